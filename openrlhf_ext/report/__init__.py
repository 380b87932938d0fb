"""The report: runs and benchmark suites as one HTML page with plots, from their run directories."""
