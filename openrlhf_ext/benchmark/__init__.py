"""What a benchmark suite shows: outcomes of its runs, compared at equal rollouts and seed by seed."""
