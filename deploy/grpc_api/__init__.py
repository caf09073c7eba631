"""The gRPC API: methods of `tide.v1.TideService` and conversion of their messages."""
