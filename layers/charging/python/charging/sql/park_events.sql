-- Takes waiting events out of the relay's reach, writes down who did it and why, and returns the events.
--
-- `attempts` grows, so that a relay which is sending the event at this moment can no longer complete it: the message
-- arrives, and the event stays parked. `was_claimed` says of which events that may be so: they have been claimed, and are
-- due again within the time of a lease.
--
-- Run it after await_operators.sql. Finds the rows by primary key (for num_nonnulls see complete_events.sql), and locks
-- them to the end of the transaction. Skips those that are no longer waiting or that somebody else is changing at this
-- moment.
WITH taken AS (
    SELECT
        id,
        attempts > 0 AND next_attempt_at > now()
            AND next_attempt_at <= now() + make_interval(secs => %(lease_seconds)s) AS was_claimed
    FROM outbox
    WHERE id = ANY (%(ids)s) AND num_nonnulls(published_at, failed_at) = 0
    FOR UPDATE SKIP LOCKED
),
parked AS (
    UPDATE outbox
    SET failed_at = now(),
        attempts = mod(attempts, 2147483647) + 1,
        last_error = 'Parked by an operator: ' || %(reason)s
    FROM taken
    WHERE outbox.id = taken.id
    RETURNING outbox.id, taken.was_claimed
),
recorded AS (
    INSERT INTO operator_actions (id, taken_at, operator, action, reason, selection, event_ids)
    SELECT
        %(action_id)s, clock_timestamp(), %(operator)s, 'park', %(reason)s, %(selection)s::jsonb, array_agg(id ORDER BY id)
    FROM parked
    HAVING count(*) > 0
)
SELECT id, was_claimed
FROM parked
ORDER BY id
