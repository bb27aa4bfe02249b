// On which side of a key tile rows stand, and the order of tiles that follows.
#include <algorithm>
#include <array>
#include <vector>

#include "check.h"
#include "mask/sides.h"

namespace flashmsa::test {
namespace {

using mask::KeyTiles;
using mask::PositionSpan;
using mask::Side;
using mask::TwoRunTiles;

// From the definition: no key of [first_key, first_key + keys) is behind the first row, or none before the last.
Side wanted_side(PositionSpan rows, int64_t first_key, int64_t keys) {
  if (first_key + keys - 1 <= rows.first) return Side::kBehind;
  return rows.last <= first_key ? Side::kBefore : Side::kAmid;
}

// Partial tiles come as they do; of the full ones each once, by sides, the nearer first.
template <class Tiles>
void check_order(const Tiles& tiles, int32_t origin, PositionSpan rows, int32_t tile_size) {
  const mask::SideOrder order = mask::side_order(tiles, origin, rows, tile_size);
  const KeyTiles& main = mask::main_tiles(tiles);
  const int32_t partial = tiles.partial_count(), count = tiles.count();
  CHECK(partial <= order.amid_end && order.amid_end <= order.behind_end && order.behind_end <= count,
        "%d, %d of [%d, %d)", order.amid_end, order.behind_end, partial, count);
  std::vector<int> seen(main.full_end, 0);
  for (int32_t step = 0; step < count; ++step) {
    const int32_t first_key = mask::first_key(tiles, origin, order, step, tile_size);
    const int32_t tile = (first_key - origin) / tile_size;
    CHECK(first_key - origin == tile * tile_size, "step %d begins at %d", step, first_key);
    if (step < partial) {
      CHECK(tile == tiles.visit(step), "step %d is tile %d", step, tile);
      continue;
    }
    if (!CHECK(main.full_begin <= tile && tile < main.full_end, "step %d is tile %d", step, tile)) return;
    ++seen[tile];
    const Side wanted = wanted_side(rows, first_key, tile_size);
    const Side found = step < order.amid_end ? Side::kAmid : step < order.behind_end ? Side::kBehind : Side::kBefore;
    CHECK(found == wanted, "rows %d … %d, keys from %d, tiles of %d: %d, not %d", rows.first, rows.last, first_key,
          tile_size, int(found), int(wanted));
    CHECK(mask::side_of(rows, first_key, tile_size) == wanted, "rows %d … %d, keys from %d", rows.first, rows.last,
          first_key);
    const int32_t way =
        found == Side::kBefore ? order.before_key + step * tile_size : order.behind_key - step * tile_size;
    CHECK(found == Side::kAmid || first_key == way, "step %d begins at %d, not %d", step, first_key, way);
    if (step > order.amid_end && step != order.behind_end) {
      const int32_t before = mask::first_key(tiles, origin, order, step - 1, tile_size);
      CHECK(first_key - before == (found == Side::kBehind ? -tile_size : tile_size), "key %d after %d", first_key,
            before);
    }
  }
  CHECK(std::all_of(seen.begin() + main.full_begin, seen.end(), [](int n) { return n == 1; }), "[%d, %d)",
        main.full_begin, main.full_end);
}

KeyTiles random_tiles(Random& random) {
  std::array<int32_t, 4> ends;
  for (int32_t& end : ends) end = random.between(0, 40);
  std::sort(ends.begin(), ends.end());
  return {ends[0], ends[1], ends[2], ends[3]};
}

void check_random(Random& random) {
  const int32_t tile_size = random.pick({64, 128}), origin = random.pick({0, random.between(0, 300)});
  const KeyTiles tiles = random_tiles(random);
  const int32_t keys = origin + tiles.end * tile_size;
  const int32_t edge = origin + random.between(0, tiles.end) * tile_size + random.between(-1, 1);
  const int32_t first = random.pick({random.between(-200, keys + 200), edge, edge - 63, INT32_MIN / 2, INT32_MAX / 2});
  const PositionSpan rows = {first, first + random.pick({0, 63, random.between(0, 63)})};
  check_order(tiles, origin, rows, tile_size);
  check_order(tiles, origin, mask::kEverywhere, tile_size);
  check_order(tiles, origin, mask::kBehindAll, tile_size);
  TwoRunTiles two = {tiles, 0, 0};
  two.first_end = random.between(0, tiles.begin);
  two.first_begin = random.between(0, two.first_end);
  check_order(two, origin, rows, tile_size);
}

int run() {
  Random random(17);
  for (int i = 0; i < 20000; ++i) check_random(random);
  return report("test_sides");
}

}  // namespace
}  // namespace flashmsa::test

int main() { return flashmsa::test::run(); }
