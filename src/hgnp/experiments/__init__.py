"""What surrounds the method: reading, comparing and showing runs."""
