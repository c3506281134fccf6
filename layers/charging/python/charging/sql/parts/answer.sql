-- Always returns one row:
--   committed_status  the status of the response that this call has stored; null when it has stored none
--   held              whether it got the key's advisory lock; null when a stored row was found first
--   others            the row that is stored under the key and still counts, all null when there is none
-- Nothing committed, held and nothing stored: somebody committed the key, or purged it, after this statement's
-- snapshot was taken. Run the statement again: the new snapshot sees what is there now.
SELECT
    (SELECT response_status FROM won) AS committed_status,
    locked.held,
    stored.status,
    stored.fingerprint,
    stored.response_status,
    stored.response_headers,
    stored.response_body
FROM (VALUES (true)) AS always (answers)
LEFT JOIN locked ON true
LEFT JOIN stored ON true
