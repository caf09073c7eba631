"""Tools in chats, for both APIs: what a request asks of them, parsers of the calls that models write, and grammars that
force a call."""
