-- Leases the events that the step `due` has found: charges the attempt and pushes the row past the lease. A row whose lease
-- has ended is simply due again, so what a dead relay held comes back by itself. Whatever was set to be due before 1970 says
-- so of 1970, since -infinity is no time to a program.
UPDATE outbox
SET attempts = mod(attempts, 2147483647) + 1,
    next_attempt_at = now() + make_interval(secs => %(lease_seconds)s)
FROM due
WHERE outbox.id = due.id
RETURNING
    outbox.id, outbox.event_type, outbox.aggregate_id, outbox.payload, outbox.attempts, outbox.refusals,
    greatest(due.next_attempt_at, to_timestamp(0)) AS due_at
