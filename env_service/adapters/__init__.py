"""Environments of other libraries: Gymnasium, PettingZoo and VMAS behind the contract."""
