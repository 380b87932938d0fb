"""Reward files for OpenRLHF's `reward.remote_url`, and the pool that runs any reward file under a deadline."""
