"""Engines carry bytes between hosts: Gloo and NCCL through torch, MPI through mpi4py."""
