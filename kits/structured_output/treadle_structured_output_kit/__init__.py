"""What structured output backends are built on."""
