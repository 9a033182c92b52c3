"""What the journal does inside Redis: scripts that compare the epoch before they write, so that each is one step for everybody else."""

from __future__ import annotations

# KEYS fence, stream, places. ARGV epoch, id before the first new one, then (id, record, payload, crc, place or "") of each entry.
APPEND = """
if redis.call('HGET', KEYS[1], 'epoch') ~= ARGV[1] then return redis.error_reply('FENCED ' .. (redis.call('HGET', KEYS[1], 'epoch') or 'none')) end
local tip = redis.call('EXISTS', KEYS[2]) == 1 and redis.call('XINFO', 'STREAM', KEYS[2])[8] or '0-0'
local function parts(id) local a, b = string.match(id, '(%d+)-(%d+)'); return tonumber(a), tonumber(b) end
local function less(x, y) local a, b = parts(x); local c, d = parts(y); return a < c or (a == c and b < d) end
if less(tip, ARGV[2]) then return redis.error_reply('LOST ' .. tip) end
for i = 3, #ARGV, 5 do
  if less(tip, ARGV[i]) then
    redis.call('XADD', KEYS[2], ARGV[i], 'r', ARGV[i + 1], 'p', ARGV[i + 2], 'c', ARGV[i + 3])
    if ARGV[i + 4] ~= '' then redis.call('HSET', KEYS[3], ARGV[i + 4], ARGV[i]) end
  end
end
return 'OK'
"""
# KEYS fence, alive. ARGV epoch, holder, milliseconds.
RENEW = """
if redis.call('HGET', KEYS[1], 'epoch') ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[2], ARGV[2], 'PX', ARGV[3])
return 1
"""
# KEYS fence, alive. ARGV the holder that was seen ("" for none), the new one, milliseconds, least epoch. Returns the epoch, or 0.
TAKE = """
if (redis.call('GET', KEYS[2]) or '') ~= ARGV[1] then return 0 end
local epoch = math.max(tonumber(redis.call('HGET', KEYS[1], 'epoch') or '0') + 1, tonumber(ARGV[4]))
redis.call('HSET', KEYS[1], 'epoch', epoch, 'holder', ARGV[2])
redis.call('SET', KEYS[2], ARGV[2], 'PX', ARGV[3])
return epoch
"""
