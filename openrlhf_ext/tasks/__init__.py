"""Small tasks with verifiable rewards, for tests, demos and method comparisons."""
