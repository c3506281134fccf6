-- Leases the events that the step `due` has found: charges the attempt and pushes the row past the lease. A row whose lease
-- has ended is simply due again, so what a dead relay held comes back by itself.
UPDATE outbox
SET attempts = mod(attempts, 2147483647) + 1,
    next_attempt_at = now() + make_interval(secs => %(lease_seconds)s)
FROM due
WHERE outbox.id = due.id
RETURNING
    outbox.id, outbox.event_type, outbox.aggregate_id, outbox.payload, outbox.attempts, outbox.refusals,
    due.next_attempt_at AS due_at
