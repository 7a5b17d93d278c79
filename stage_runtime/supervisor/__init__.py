"""Keeps replica processes up: devices, restarts, Ray."""
