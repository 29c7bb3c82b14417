"""What load formats are built on."""
