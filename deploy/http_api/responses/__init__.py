"""OpenAI's Responses API without state: a body becomes the chat it stands for, and the answer becomes items."""
