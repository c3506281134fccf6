"""Idempotent charges, their transactional outbox, and what carries their events on."""
