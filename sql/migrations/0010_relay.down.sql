DROP FUNCTION afluente.relay_facts();
DROP TABLE afluente.relay_lane;
