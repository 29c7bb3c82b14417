"""What parsers of tool calls and of reasoning are built on."""
