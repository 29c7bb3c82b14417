"""The Messages API: requests become chats, outputs become content blocks, errors have their envelope."""
