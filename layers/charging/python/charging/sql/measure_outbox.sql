-- How much waits in the outbox and for how long. Uses the partial index outbox_due, and reads no more than `bound` rows of
-- it, those that have been due longest: amid an outage there may be millions, and this has to be known just then. Of more
-- the count is the bound, and the age that of the oldest row that was not tried meanwhile. The failed rows are counted by
-- the index outbox_failed, up to the bound, too.
--
-- And what keeps the queue's dead rows from being removed: how many transactions ago the oldest snapshot was taken
-- that somebody still holds, be it a session, a replication slot or a prepared transaction. This statement's own is
-- not counted, and those of other databases hold up nothing here. What sessions of other roles hold shows only to a
-- member of pg_read_all_stats.
SELECT
    waiting.oldest_age_seconds,
    waiting.pending,
    (SELECT count(*) FROM (SELECT FROM outbox WHERE failed_at IS NOT NULL LIMIT %(bound)s) AS parked) AS failed,
    (
        SELECT COALESCE(max(age(held)), 0)
        FROM (
            SELECT unnest(ARRAY[backend_xmin, backend_xid])
            FROM pg_stat_activity
            WHERE pid <> pg_backend_pid() AND (datname = current_database() OR datname IS NULL)
              -- It shows a snapshot, and holds nothing up by it.
              AND pid NOT IN (SELECT pid FROM pg_stat_progress_vacuum)
            UNION ALL
            SELECT xmin FROM pg_replication_slots
            UNION ALL
            SELECT transaction FROM pg_prepared_xacts WHERE database = current_database()
        ) AS horizon (held)
    ) AS xmin_age
FROM (
    SELECT
        COALESCE(EXTRACT(EPOCH FROM now() - min(created_at)), 0)::float8 AS oldest_age_seconds,
        count(*) AS pending
    FROM (
        SELECT created_at
        FROM outbox
        WHERE published_at IS NULL AND failed_at IS NULL
        ORDER BY next_attempt_at, id
        LIMIT %(bound)s
    ) AS longest_due
) AS waiting
