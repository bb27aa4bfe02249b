// The order of key tiles in the backward pass: a permutation, turns that count it, and additions in turn that never come to
// a standstill, however few CTAs run at a time.
#include "bwd/key_order.h"

#include <algorithm>
#include <vector>

#include "check.h"

namespace flashmsa::test {
namespace {

using bwd::KeyOrder;

void check_places(const KeyOrder& order) {
  std::vector<int32_t> place(order.tiles, -1);
  for (int32_t i = 0; i < order.tiles; ++i) {
    const int32_t tile = order.nth(i);
    if (!CHECK(0 <= tile && tile < order.tiles && place[tile] < 0, "place %d of (%d, %d): tile %d", i, order.tiles,
               order.block, tile)) {
      return;
    }
    place[tile] = i;
  }
  for (int32_t a = 0; a < order.tiles; ++a) {
    for (int32_t b = 0; b < order.tiles; ++b) {
      CHECK(order.starts_before(a, b) == (place[a] < place[b]), "(%d, %d): tile %d at %d, %d at %d", order.tiles,
            order.block, a, place[a], b, place[b]);
    }
  }
}

// Which key tiles meet which tiles of queries.
using Meets = std::vector<std::vector<bool>>;

int32_t turn_of(const KeyOrder& order, const std::vector<bool>& meets, int32_t tile) {
  return order.before(tile, [&](int32_t begin, int32_t end) {
    int32_t count = 0;
    for (int32_t n = begin; n < end; ++n) count += meets[n] ? 1 : 0;
    return count;
  });
}

void check_turns(const KeyOrder& order, const std::vector<bool>& meets) {
  int32_t turn = 0;
  for (int32_t i = 0; i < order.tiles; ++i) {
    const int32_t tile = order.nth(i);
    if (!meets[tile]) continue;
    CHECK(turn_of(order, meets, tile) == turn, "(%d, %d): tile %d has turn %d instead of %d", order.tiles, order.block,
          tile, turn_of(order, meets, tile), turn);
    ++turn;
  }
}

// CTAs start in order as places become free, `running` at a time, and walk over their queries from first to last; turns end
// `batch` steps at a time.
void check_progress(const KeyOrder& order, const Meets& meets, int32_t running, int32_t batch, Random& random) {
  struct Cta {
    int32_t tile;
    size_t query = 0;
    std::vector<size_t> open;
  };
  std::vector<int32_t> ended(meets.size(), 0);
  std::vector<Cta> ctas;
  int32_t started = 0, finished = 0, idle = 0;
  const auto end_turns = [&](Cta& cta) {
    for (size_t query : cta.open) ++ended[query];
    cta.open.clear();
  };
  while (finished < order.tiles) {
    while (started < order.tiles && static_cast<int32_t>(ctas.size()) < running)
      ctas.push_back({order.nth(started++), 0, {}});
    const size_t first = random.between(0, static_cast<int>(ctas.size()) - 1);
    bool moved = false;
    for (size_t i = 0; i < ctas.size() && !moved; ++i) {
      Cta& cta = ctas[(first + i) % ctas.size()];
      while (cta.query < meets.size() && !meets[cta.query][cta.tile]) ++cta.query;
      moved = true;
      if (cta.query == meets.size()) {
        end_turns(cta);
        std::swap(cta, ctas.back());
        ctas.pop_back();
        ++finished;
      } else if (ended[cta.query] == turn_of(order, meets[cta.query], cta.tile)) {
        if (static_cast<int32_t>(cta.open.size()) == batch) end_turns(cta);
        cta.open.push_back(cta.query++);
      } else {
        moved = false;
      }
    }
    idle = moved ? 0 : idle + 1;
    if (!CHECK(idle == 0, "(%d, %d): %d of %d CTAs wait for each other", order.tiles, order.block,
               static_cast<int>(ctas.size()), running)) {
      return;
    }
  }
}

int run() {
  for (int32_t tiles : {1, 2, 3, 7, 8, 9, 33, 64}) {
    for (int32_t block = 1; block <= tiles + 1; ++block) check_places({tiles, block});
  }
  Random random(47);
  for (int32_t trial = 0; trial < 400; ++trial) {
    const KeyOrder order = {random.between(1, 40), random.pick({1, 2, 5, 8, 100})};
    Meets meets(random.between(1, 30), std::vector<bool>(order.tiles));
    const int32_t kind = random.between(0, 2), percent = random.between(0, 100);
    for (size_t query = 0; query < meets.size(); ++query) {
      for (int32_t n = 0; n < order.tiles; ++n) {
        const bool causal = n * static_cast<int32_t>(meets.size()) <= static_cast<int32_t>(query) * order.tiles;
        meets[query][n] = kind == 0 || (kind == 1 ? causal : random.between(1, 100) <= percent);
      }
      check_turns(order, meets[query]);
    }
    check_progress(order, meets, random.pick({1, 2, 7, 132}), random.between(1, 3), random);
  }
  return report("test_key_order");
}

}  // namespace
}  // namespace flashmsa::test

int main() { return flashmsa::test::run(); }
