"""Shared helpers of the tests: real servers, one test body for both APIs, a proxy that breaks connections on
purpose."""
