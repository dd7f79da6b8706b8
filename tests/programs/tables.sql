-- Two tables, an index, joins, updates and deletes, and the database's own check of itself.
CREATE TABLE item(id INTEGER PRIMARY KEY, name TEXT, price INTEGER, note TEXT);
CREATE TABLE sale(item INTEGER, amount INTEGER, place TEXT);
BEGIN;
WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 400000)
INSERT INTO item
SELECT i, 'item ' || i, i * 7919 % 10007, 'a note about item ' || i || ', not a short one, but text' FROM n;
WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 600000)
INSERT INTO sale SELECT i * 31 % 400000 + 1, i % 13, 'place ' || i % 997 FROM n;
COMMIT;
CREATE INDEX item_name ON item(name);
CREATE INDEX sale_item ON sale(item, amount);
PRAGMA integrity_check;
SELECT count(*), sum(price), max(name), sum(length(note)) FROM item;
SELECT place, count(*), sum(amount * price) FROM sale JOIN item ON id = item GROUP BY place ORDER BY 3 DESC LIMIT 20;
UPDATE item SET note = note || ' and more of it' WHERE id % 3 = 0;
DELETE FROM sale WHERE item % 5 = 0;
SELECT count(*), sum(price), sum(length(note)) FROM item WHERE name BETWEEN 'item 2' AND 'item 3';
SELECT count(*), sum(amount) FROM sale;
PRAGMA integrity_check;
