-- How much waits in the outbox and for how long. Uses the partial index outbox_due; the failed rows are
-- counted by the index outbox_failed.
SELECT
    (
        SELECT COALESCE(EXTRACT(EPOCH FROM now() - min(created_at)), 0)::float8
        FROM outbox
        WHERE published_at IS NULL AND failed_at IS NULL
    ) AS oldest_age_seconds,
    (SELECT count(*) FROM outbox WHERE published_at IS NULL AND failed_at IS NULL) AS pending,
    (SELECT count(*) FROM outbox WHERE failed_at IS NOT NULL) AS failed
