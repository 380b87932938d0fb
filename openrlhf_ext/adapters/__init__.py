"""The only folder that imports openrlhf, ray, vllm or deepspeed. Importing it imports none of them."""
