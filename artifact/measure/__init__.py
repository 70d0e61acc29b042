"""What runs in measuring processes: the cells that claims ask for, and the plans that say which."""
