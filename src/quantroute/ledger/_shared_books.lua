-- The books of a shared ledger: checks and applies a batch of operations, all of it in one go.
--
-- A Lua number is a double, exact only up to 2^53, which is $9,007 in pico-dollars. So no amount is
-- ever a number here: sums change by HINCRBY, which is 64-bit, and amounts are compared as decimal
-- digits. What an account still admits is kept as a sum of its own, `room`, so that to decide is to
-- compare two strings of digits: room = limit - posted - pending, at every instant.
--
-- An error in the middle of a script does not undo what came before it. So everything is checked
-- before anything is written, operation by operation.
--
-- KEYS: accounts, entries, lines, journal, notes, owners
-- ARGV: ledger id, owner, batch number, what the owner says about itself, operations (JSON)

local ACCOUNTS, ENTRIES, LINES, JOURNAL, NOTES, OWNERS = unpack(KEYS)
local MAX = '9223372036854775807'
local NEAR_MAX = 9.2e18

local function call(...) return redis.call(...) end

if call('HGET', OWNERS, 'ledger') ~= ARGV[1] then
  return redis.error_reply('LEDGER this is not the ledger that was opened: the server lost its data, or it was replaced')
end

-- A batch is sent again when its reply was lost: then its reply is given again. One that is older
-- was delayed on a broken connection, and is void. One that is too young comes after batches that
-- this server confirmed and no longer knows: its sums are too low.
local owner = ARGV[2]
local last = tonumber(call('HGET', OWNERS, owner .. '\tbatch') or '0')
local batch = tonumber(ARGV[3])
if batch < last then return redis.error_reply('STALE batch') end
if batch == last then return {call('HGET', OWNERS, owner .. '\treply'), call('HGETALL', ACCOUNTS)} end

-- Non-negative decimal numbers without leading zeros: the longer one is the larger one.
local function exceeds(a, b)
  if #a ~= #b then return #a > #b end
  return a > b
end

local function forgotten(what)
  return redis.error_reply('LEDGER the server has forgotten what it had confirmed: ' .. what)
end

if batch > last + 1 then
  return forgotten('of ' .. (batch - 1) .. ' batches of this worker it knows ' .. last)
end

local function get(path, name) return call('HGET', ACCOUNTS, path .. '\t' .. name) or '0' end

local function add(path, name, amount)
  if amount ~= '0' then call('HINCRBY', ACCOUNTS, path .. '\t' .. name, amount) end
end

local function subtract(path, name, amount)
  if amount ~= '0' then call('HINCRBY', ACCOUNTS, path .. '\t' .. name, '-' .. amount) end
end

local function line(entry, name, amount)
  if amount ~= '0' then
    call('HINCRBY', LINES, entry.account .. '\t' .. name .. '\t' .. entry.endpoint, amount)
  end
end

-- Each of the keys can go alone, by eviction or by hand. Without its accounts there is no cap.
local function missing()
  local is_kept = call('HEXISTS', ACCOUNTS, '\troom')
  if call('EXISTS', JOURNAL) ~= is_kept then return is_kept == 1 and JOURNAL or ACCOUNTS end
  if tostring(call('HLEN', ENTRIES)) ~= get('', 'open_entries') then return ENTRIES end
  local is_settled = get('', 'posted_entries') ~= '0' or get('', 'voided_entries') ~= '0'
  if is_settled and call('EXISTS', LINES) == 0 then return LINES end
end

local lost = missing()
if lost then return forgotten(lost .. ' is missing, or not all there') end

-- The root, every account on the way, and the account itself.
local function lineage(account)
  local paths, path = {''}, nil
  for part in string.gmatch(account, '[^/]+') do
    path = path and (path .. '/' .. part) or part
    paths[#paths + 1] = path
  end
  return paths
end

local function ensure(path) call('HSETNX', ACCOUNTS, path .. '\troom', MAX) end

local function keep(record) call('XADD', JOURNAL, '*', 'r', record) end

local function load(id)
  local found = call('HGET', ENTRIES, id)
  return found and cjson.decode(found)
end

local function save(id, entry) call('HSET', ENTRIES, id, cjson.encode(entry)) end

local function not_open() return {state = 'not open'} end

local function resolve(op, entry, sum)
  call('HDEL', ENTRIES, op.id)
  local was_held = entry.status == 'held'
  for _, path in ipairs(lineage(entry.account)) do
    subtract(path, 'pending_pusd', entry.reserved_pusd)
    add(path, 'room', entry.reserved_pusd)
    subtract(path, 'open_entries', '1')
    if was_held then
      subtract(path, 'held_pusd', entry.reserved_pusd)
      subtract(path, 'held_entries', '1')
    end
    add(path, sum, '1')
  end
  line(entry, 'entries', '1')
  -- Those who hold the row of this entry may not be those who found out: they can ask here.
  if was_held then call('HSET', NOTES, 'settled\t' .. op.id, op.record) end
  keep(op.record)
  return 0
end

local operations = {}

function operations.reserve(op)
  if call('HEXISTS', ENTRIES, op.id) == 1 then return {state = 'known already'} end
  local entry = op.entry
  local paths, fits = lineage(entry.account), true
  for _, path in ipairs(paths) do
    local room = call('HGET', ACCOUNTS, path .. '\troom') or MAX
    if string.sub(room, 1, 1) == '-' or exceeds(entry.reserved_pusd, room) then fits = false end
  end
  if not fits then
    local facts = {}
    for index, path in ipairs(paths) do
      if call('HEXISTS', ACCOUNTS, path .. '\troom') == 1 then
        facts[#facts + 1] = {path, call('HGET', ACCOUNTS, path .. '\tcap') or MAX,
          get(path, 'posted_pusd'), get(path, 'pending_pusd'), get(path, 'held_pusd')}
      end
    end
    return {refused = facts}
  end
  for _, path in ipairs(paths) do
    ensure(path)
    subtract(path, 'room', entry.reserved_pusd)
    add(path, 'pending_pusd', entry.reserved_pusd)
    add(path, 'open_entries', '1')
  end
  save(op.id, entry)
  keep(op.record)
  return 0
end

function operations.post(op)
  local entry = load(op.id)
  if not entry then return not_open() end
  -- A generation's record is one bill: it is paid once, for whichever entry.
  local bill = op.basis == 'record' and op.generation_id ~= '' and 'recorded\t' .. op.generation_id
  if bill and call('HEXISTS', NOTES, bill) == 1 then
    return {state = 'of ' .. op.generation_id .. ', whose record is posted already'}
  end
  local paths = lineage(entry.account)
  for _, path in ipairs(paths) do
    -- A sanity bound in doubles, well inside what 64 bits hold: no bill of $9.2 million is true.
    local sum = tonumber(get(path, 'posted_pusd')) + tonumber(get(path, 'pending_pusd'))
    if sum + tonumber(op.amount) > NEAR_MAX then return {impossible = get(path, 'posted_pusd')} end
  end
  resolve(op, entry, 'posted_entries')
  if bill then call('HSET', NOTES, bill, op.id) end
  local is_over = exceeds(op.amount, entry.reserved_pusd)
  for _, path in ipairs(paths) do
    subtract(path, 'room', op.amount)
    add(path, 'posted_pusd', op.amount)
    if is_over then
      add(path, 'overrun_pusd', op.amount)
      subtract(path, 'overrun_pusd', entry.reserved_pusd)
    end
    for name, count in pairs(op.usage) do add(path, name, count) end
  end
  if is_over then line(entry, 'overruns', '1') end
  for name, count in pairs(op.usage) do line(entry, name, count) end
  line(entry, op.basis, op.amount)
  return 0
end

function operations.void(op)
  local entry = load(op.id)
  if not entry then return not_open() end
  resolve(op, entry, 'voided_entries')
  line(entry, 'voided', '1')
  return 0
end

function operations.hold(op)
  local entry = load(op.id)
  if not entry then return not_open() end
  if entry.status == 'held' then return {state = 'held already'} end
  entry.status, entry.reason = 'held', op.reason
  if op.generation_id ~= '' then entry.generation_id = op.generation_id end
  save(op.id, entry)
  for _, path in ipairs(lineage(entry.account)) do
    add(path, 'held_pusd', entry.reserved_pusd)
    add(path, 'held_entries', '1')
  end
  keep(op.record)
  return 0
end

function operations.identify(op)
  local entry = load(op.id)
  if not entry then return not_open() end
  entry.generation_id = op.generation_id
  save(op.id, entry)
  keep(op.record)
  return 0
end

function operations.cap(op)
  for _, path in ipairs(lineage(op.account)) do ensure(path) end
  local path = op.account
  if op.cap == '' then
    call('HDEL', ACCOUNTS, path .. '\tcap')
  else
    call('HSET', ACCOUNTS, path .. '\tcap', op.cap)
  end
  local posted, pending = get(path, 'posted_pusd'), get(path, 'pending_pusd')
  call('HSET', ACCOUNTS, path .. '\troom', op.cap == '' and MAX or op.cap)
  subtract(path, 'room', posted)
  subtract(path, 'room', pending)
  keep(op.record)
  return 0
end

function operations.note(op)
  local found = op.keep == '1' and call('HGET', NOTES, 'note\t' .. op.key)
  if found then return {kept = found} end
  call('HSET', NOTES, 'note\t' .. op.key, op.value)
  keep(op.record)
  return 0
end

-- Says nothing but "I am alive"; also a mark in the line behind which all before it is done.
function operations.mark() return 0 end

-- An owner whose entries have all been held is forgotten; its batch number stays.
function operations.forget(op)
  call('HDEL', OWNERS, op.owner .. '\tbeat', op.owner .. '\tabout')
  return 0
end

call('HSET', OWNERS, owner .. '\tbeat', call('TIME')[1], owner .. '\tabout', ARGV[4])
local results = {}
for number, op in ipairs(cjson.decode(ARGV[5])) do results[number] = operations[op.op](op) end
local reply = cjson.encode(results)
call('HSET', OWNERS, owner .. '\tbatch', ARGV[3], owner .. '\treply', reply)
return {reply, call('HGETALL', ACCOUNTS)}
