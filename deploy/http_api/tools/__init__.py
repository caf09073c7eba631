"""Tools in chats: request fields, parsers of the calls that models write, and grammars that force a call."""
