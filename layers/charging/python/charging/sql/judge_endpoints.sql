-- Draws an endpoint's state from what became of its deliveries, and returns each endpoint's state before and after.
--
--   answered       whether one of them was sent
--   failures       how many of them failed
--   pause_seconds  how long the receiver asks to be left alone, if it does
--   gone           whether it says that it will never be there again
--   probed         whether one of them was the probe of an open breaker
--
-- Five failures in a row open the breaker, and one delivery that is sent closes it. The longer it has been open, the
-- rarer the probes: after a quarter of that time, from 30 seconds up to an hour.
--
-- What was under way when the breaker opened can close it, and is otherwise no probe: it neither reopens it nor puts the
-- probe off. A pause ends when the receiver said, or later: an answer without one, or with a shorter one, cuts none short.
-- So the endpoint is held until the first probe was due also when such an answer closes it: a pause may end at that time.
--
-- Locks the endpoints' rows until the transaction's end, in the order of their ids and after their deliveries', so that
-- no two transactions wait for each other. An endpoint whose deliveries are all sent and that had no failure before is not written to.
WITH verdict AS (
    SELECT endpoint_id, answered, failures, pause_seconds, gone, probed
    FROM unnest(
        %(endpoint_ids)s::uuid[], %(answered)s::bool[], %(failures)s::int[], %(pauses)s::float8[], %(gone)s::bool[],
        %(probed)s::bool[]
    ) AS verdict (endpoint_id, answered, failures, pause_seconds, gone, probed)
),
before AS MATERIALIZED (
    SELECT
        id, opened_at, disabled_at, resumes_at,
        CASE WHEN answered THEN 0 ELSE failures_in_a_row + failures END AS failures_in_a_row,
        pause_seconds, gone,
        -- Where the owner has enabled the endpoint meanwhile it is no probe any more, and its lease is over.
        probed AND opened_at IS NOT NULL AS probed
    FROM webhook_endpoints
    JOIN verdict ON verdict.endpoint_id = id
    WHERE failures > 0 OR failures_in_a_row > 0
    ORDER BY id
    FOR NO KEY UPDATE OF webhook_endpoints
),
judged AS (
    SELECT
        id, failures_in_a_row, pause_seconds, gone, probed,
        CASE WHEN failures_in_a_row >= 5 THEN COALESCE(opened_at, now()) END AS opened_at,
        failures_in_a_row >= 5 AND (probed OR opened_at IS NULL) AS awaits_probe
    FROM before
),
changed AS (
    UPDATE webhook_endpoints
    SET failures_in_a_row = judged.failures_in_a_row,
        opened_at = judged.opened_at,
        resumes_at = greatest(
            -- The lease of a probe that has ended holds nothing any more; whatever else holds the endpoint still does.
            CASE WHEN probed THEN now() ELSE webhook_endpoints.resumes_at END,
            now() + make_interval(secs => pause_seconds),
            CASE WHEN awaits_probe THEN now() + make_interval(
                secs => least(3600, greatest(30, EXTRACT(EPOCH FROM now() - judged.opened_at)::float8 / 4))
            ) END
        ),
        disabled_at = CASE WHEN gone THEN COALESCE(disabled_at, now()) ELSE disabled_at END,
        disabled_reason = CASE WHEN gone THEN COALESCE(disabled_reason, 'gone') ELSE disabled_reason END
    FROM judged
    WHERE webhook_endpoints.id = judged.id
    RETURNING
        webhook_endpoints.id, webhook_endpoints.opened_at, webhook_endpoints.disabled_at, pause_seconds
)
SELECT
    before.id AS endpoint_id,
    before.opened_at IS NOT NULL AS was_open,
    changed.opened_at IS NOT NULL AS is_open,
    before.disabled_at IS NOT NULL AS was_disabled,
    changed.disabled_at IS NOT NULL AS is_disabled,
    before.probed AS was_probed,
    changed.pause_seconds
FROM before
JOIN changed ON changed.id = before.id
