"""What keeps a failing environment from costing more than its episode."""
