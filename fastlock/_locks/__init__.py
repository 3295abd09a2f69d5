"""What users call: clients and locks, for threads and for asyncio. Never here: decisions, frames, replies."""
