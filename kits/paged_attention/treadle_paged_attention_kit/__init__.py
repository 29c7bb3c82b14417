"""What attention backends over a paged cache are built on."""
