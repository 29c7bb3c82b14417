"""The Responses API: requests become chats, outputs become items, answers are kept for a while."""
