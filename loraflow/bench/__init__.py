"""The standalone sync throughput test."""
