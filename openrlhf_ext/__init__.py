"""Sample-efficient reinforcement learning with verifiable rewards, beside OpenRLHF 0.11.2.

Where to start reading:

1. ``types.py``: the nouns (prompt, rollout, group).
2. ``sampling.py``: which groups a train step gets (plain, filtered, DAPO rounds); ``ledger.py``: where every rollout
   went.
3. ``batching.py``: how any number of rows becomes micro-batches on every rank.
4. ``adapters/``: the only folder that imports openrlhf, ray, vllm or deepspeed.

Importing this package imports nothing else.
"""

__version__ = "0.1.0"
