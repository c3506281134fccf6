-- Makes parked or published events due again, so many a second, writes down who did it and why, and returns the events
-- with the times at which they are due.
--
-- The first is due now, or, while the last event of the redrive before is still to come, after that one: two redrives are
-- no faster than one. The events of an aggregate follow one another by their sequence. The id and the payload stay;
-- `attempts` grows, so that whoever holds an older claim on the event can no longer complete it; `last_error` stays until
-- the next attempt has its own.
--
-- Run it after await_operators.sql, which also keeps taken_at in the order of the redrives. Finds the rows by primary key,
-- and the redrive before by reading operator_actions; the states are asked for as complete_events.sql does, and why stands
-- there. Locks the rows to the end of the transaction, and skips those that are no longer in the state or that somebody
-- else is changing at this moment.
WITH taken AS (
    SELECT id, aggregate_id, sequence, created_at
    FROM outbox
    WHERE id = ANY (%(ids)s)
      AND CASE %(state)s WHEN 'parked' THEN num_nonnulls(failed_at) ELSE num_nonnulls(published_at) END = 1
    FOR UPDATE SKIP LOCKED
),
numbered AS (
    SELECT id, row_number() OVER (ORDER BY first_created_at, aggregate_id, sequence) - 1 AS number
    FROM (
        SELECT id, aggregate_id, sequence, min(created_at) OVER (PARTITION BY aggregate_id) AS first_created_at
        FROM taken
    ) AS by_aggregate
),
redriven_before AS (
    SELECT event_ids[cardinality(event_ids)] AS last_id
    FROM operator_actions
    WHERE action = 'redrive'
    ORDER BY taken_at DESC
    LIMIT 1
),
start AS (
    SELECT COALESCE(
        (
            SELECT next_attempt_at + make_interval(secs => 1::float8 / %(per_second)s)
            FROM outbox
            WHERE id = (SELECT last_id FROM redriven_before)
              AND num_nonnulls(published_at, failed_at) = 0 AND next_attempt_at > now()
        ),
        now()
    ) AS at
),
redriven AS (
    UPDATE outbox
    SET published_at = NULL,
        failed_at = NULL,
        attempts = mod(attempts, 2147483647) + 1,
        refusals = 0,
        next_attempt_at = start.at + make_interval(secs => numbered.number::float8 / %(per_second)s)
    FROM numbered, start
    WHERE outbox.id = numbered.id
    RETURNING outbox.id, outbox.next_attempt_at
),
recorded AS (
    INSERT INTO operator_actions (id, taken_at, operator, action, reason, selection, event_ids)
    SELECT
        %(action_id)s, clock_timestamp(), %(operator)s, 'redrive', %(reason)s, %(selection)s::jsonb,
        array_agg(id ORDER BY next_attempt_at)
    FROM redriven
    HAVING count(*) > 0
)
SELECT id, next_attempt_at
FROM redriven
ORDER BY next_attempt_at
