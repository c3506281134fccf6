-- Leases the deliveries that the step `due` has found, and returns them with what it says of their endpoints.
UPDATE outbox_deliveries
SET status = 'CLAIMED',
    attempts = attempts + 1,
    next_attempt_at = now() + make_interval(secs => %(lease_seconds)s)
FROM due
WHERE outbox_deliveries.endpoint_id = due.endpoint_id AND outbox_deliveries.event_id = due.event_id
RETURNING
    outbox_deliveries.endpoint_id, outbox_deliveries.event_id, payload, attempts, failures,
    due.url, due.secret_version, due.previous_signs, due.is_probe
