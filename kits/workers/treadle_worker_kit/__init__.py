"""What executors are built on."""
