"""What DATC costs over GRPO in this trainer."""
