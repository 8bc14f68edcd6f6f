//! Tests tables against a model of plain maps, with reopened and full tables.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;
use pushpull_common::catalogue::Catalogue;
use pushpull_common::ids::ShardId;
use pushpull_common::placement::{Placement, PlacementStrategy as Placing, ShardMap};
use pushpull_common::rows::{Numbers, encode_numbers};
use pushpull_common::table::{Eviction, RowAdmission, RowHead, TableSpec};
use pushpull_common::variable::VariableSpec;
use pushpull_optim::optimizer::{Adagrad, ApplyAt, Optimizer};

use super::*;
use crate::arena::{Arena, ArenaStorage, Budget};
use crate::change::{Change, Stalled};
use crate::commit::table_bytes;
use crate::error::StorageError;
use crate::layout::{Kind, PAGE_BYTES, Stamp};
use crate::planted::PlantedBugs;
use crate::testing::test_files::{Content, TestFiles};
use crate::undo::{Undo, UndoRow};

const WIDTH: usize = 3;
/// The budget of a row: its values, a slot of Adagrad, and the overhead.
const ROW: u64 = 32 + TableSpec::ROW_OVERHEAD_BYTES;

/// A table without a shard, on files that outlive it.
struct TestTable {
    arena: Arena,
    catalogue: Catalogue,
    budget: Budget,
    journal: Journal,
    table: Table,
    undo: Undo,
    /// Whether existing rows are changed in place.
    in_place: bool,
    rule: Adagrad,
    version: u64,
}

impl TestTable {
    fn new(spec: TableSpec) -> TestTable {
        TestTable::within(spec, Budget::new(1 << 30))
    }

    fn within(spec: TableSpec, budget: Budget) -> TestTable {
        let uniform = Initializer::Uniform { low: -1.0, high: 1.0 };
        let variable = VariableSpec::table("t", DType::F32, [WIDTH as u64], spec).unwrap();
        let variables = vec![variable.initializer(uniform).seed(7)];
        let map = ShardMap::new([0], 1).unwrap();
        let placement = Placement::plan(&variables, &map, &Placing::RoundRobin).unwrap();
        let catalogue = Catalogue::new(variables, &placement).unwrap();
        let stamp = Stamp { shard: ShardId::default(), arena: 77 };
        let arena = Arena { storage: ArenaStorage::TestFiles(TestFiles::default()), stamp };
        let control = arena.create(Kind::Control, 0, PAGE_BYTES as u64).unwrap();
        let mut journal = Journal::create(&arena, control, 64, PlantedBugs::default()).unwrap();
        let tables = arena.create(Kind::Tables, 1, table_bytes(1)).unwrap();
        journal.begin_tables(tables, 1, std::iter::empty());
        let rule = Adagrad::new(0.1);
        let undo = Undo::create(arena.create(Kind::Undo, 1, Undo::bytes(1 << 20)).unwrap());
        let inputs = inputs(&arena, &catalogue, &budget, &rule, &[]);
        let table = Table::create(inputs, &mut journal).unwrap();
        let in_place = true;
        let version = 0;
        let mut fixture =
            TestTable { arena, catalogue, budget, journal, table, undo, in_place, rule, version };
        fixture.commit();
        fixture
    }

    /// Reopens the table as another process would.
    fn reopened(self) -> TestTable {
        let TestTable { arena, catalogue, budget, journal, table, undo, in_place, rule, version } =
            self;
        drop((journal, table, undo));
        let control = arena.open(Kind::Control, 0, None).unwrap();
        let mut journal = Journal::open(&arena, control, PlantedBugs::default()).unwrap();
        journal.first_cell().unwrap();
        journal.use_tables(arena.open(Kind::Tables, 1, None).unwrap(), 1);
        Table::map_index(&arena, 1, 0, &mut journal).unwrap();
        journal.redo().unwrap();
        journal.check_intent(64).unwrap();
        let mut undo = Undo::open(arena.open(Kind::Undo, 1, None).unwrap());
        let undo_rows = undo.rows(version).unwrap();
        let inputs = inputs(&arena, &catalogue, &budget, &rule, &undo_rows);
        let table = Table::open(inputs, &mut journal).unwrap();
        undo.clear();
        TestTable { arena, catalogue, budget, journal, table, undo, in_place, rule, version }
    }

    fn commit(&mut self) {
        self.table.stage_head(&mut self.journal);
        self.journal.commit();
        self.table.committed();
        self.undo.clear();
        self.table.check_invariants(&self.journal);
    }

    /// Begins a push of these rows, whose ids ascend, and applies it without a commit.
    fn begin(&mut self, step: u64, rows: &[(u64, f32)]) -> Result<(), Stalled> {
        let ids: Vec<u64> = rows.iter().map(|(id, _)| *id).collect();
        self.table.begin(&mut self.journal, &ids, step, self.version + 1, false)?;
        self.journal.grow_intent(self.table.dirty_words()).unwrap();
        let in_place = self.table.undo_need().is_some() && self.in_place;
        self.undo.begin(self.version + 1);
        self.table.settle(in_place);
        let at = ApplyAt::new(self.version + 1, step);
        let change = Change::Gradient { optimizer: &self.rule, at, dtype: DType::F32 };
        // In two pieces, as a shard slices its work.
        let gradients: Vec<f32> = rows.iter().flat_map(|(_, value)| [*value; WIDTH]).collect();
        let half = rows.len() / 2;
        let (head, rest) = gradients.split_at(half * WIDTH);
        for (places, input) in [(0..half, head), (half..rows.len(), rest)] {
            let input = bytemuck::cast_slice(input);
            let planted = PlantedBugs::default();
            self.table.change_rows(change, places, input, &mut self.undo, planted);
        }
        Ok(())
    }

    fn push(&mut self, step: u64, rows: &[(u64, f32)]) {
        self.begin(step, rows).unwrap();
        self.table.publish(&mut self.journal);
        self.version += 1;
        self.commit();
    }

    /// Pushes these rows again and again. Returns how many pushes had memory, and why the next had
    /// none.
    fn push_until_stalled(&mut self, step: u64, rows: &[(u64, f32)]) -> (u32, Stalled) {
        let mut made = 0;
        loop {
            match self.begin(step, rows) {
                Ok(()) => self.table.publish(&mut self.journal),
                Err(stalled) => return (made, stalled),
            }
            self.version += 1;
            self.commit();
            made += 1;
        }
    }

    fn push_ids(&mut self, step: u64, ids: impl IntoIterator<Item = u64>) {
        let rows: Vec<(u64, f32)> = ids.into_iter().map(|id| (id, 1.0)).collect();
        self.push(step, &rows);
    }

    fn pull(&self, ids: &[u64]) -> (Vec<Vec<f32>>, u64) {
        let mut encoded = Vec::new();
        encode_numbers(self.table.partition(), ids.iter().copied(), &mut encoded);
        let numbers = Numbers::of(self.table.partition(), &encoded);
        let mut rows = Vec::new();
        let have = self.table.gather(&self.journal, numbers, &mut Vec::new(), &mut rows);
        let rows: Vec<f32> = rows.chunks(4).map(bytemuck::pod_read_unaligned).collect();
        (rows.chunks(WIDTH).map(<[f32]>::to_vec).collect(), have)
    }

    fn has(&self, id: u64) -> bool {
        self.pull(&[id]).1 == 1
    }

    fn ids(&mut self) -> BTreeSet<u64> {
        self.table.image(0).heads().map(|head| head.id).collect()
    }

    /// Returns the initial values of a row.
    fn first(&self, id: u64) -> Vec<f32> {
        let mut row = vec![0.0; WIDTH];
        self.table.initial.fill(DType::F32, id, bytemuck::cast_slice_mut(&mut row));
        row
    }
}

fn inputs<'a>(
    arena: &Arena,
    catalogue: &'a Catalogue,
    budget: &Budget,
    rule: &'a Adagrad,
    undo_rows: &'a [UndoRow],
) -> TableInputs<'a> {
    let arena = arena.clone();
    let partition = &catalogue.partitions()[0];
    let promises = Table::need(catalogue, partition, rule.slots().len(), 1).promised(budget);
    TableInputs {
        files: TableFiles { arena, generation: 1, table: 0, promises },
        catalogue,
        partition,
        slots: rule.slots(),
        integrity: true,
        undo_rows,
    }
}

#[test]
fn pushes_add_rows_that_persist() {
    let mut fixture = TestTable::new(TableSpec::new(1 << 20));
    let ids = [3, u64::MAX, 0];
    let (before, have) = fixture.pull(&ids);
    assert_eq!((have, &before[1]), (0, &fixture.first(u64::MAX)), "the id was never pushed");
    assert_eq!(fixture.table.rows(), 0, "a pull changes nothing");
    fixture.push(4, &[(0, 1.0), (3, 0.0), (u64::MAX, 2.0)]);
    let (after, have) = fixture.pull(&ids);
    assert_eq!((have, fixture.table.rows()), (3, 3));
    assert_eq!(after[0], before[0], "a gradient of 0");
    // Adagrad's accumulator starts at 0.1.
    let moved =
        |from: f32, gradient: f32| from - 0.1 * gradient / (0.1 + gradient * gradient).sqrt();
    assert!((after[1][0] - moved(before[1][0], 2.0)).abs() < 1e-6);
    let mut fixture = fixture.reopened();
    assert_eq!(fixture.pull(&ids), (after, 3));
    let heads: Vec<RowHead> = fixture.table.image(9).heads().collect();
    assert!(heads.iter().all(|head| (head.step, head.pushes) == (4, 1)), "{heads:?}");
    fixture.push(5, &[(3, 0.0)]);
    let head = fixture.table.image(0).heads().find(|head| head.id == 3).unwrap();
    assert_eq!((head.step, head.pushes), (9, 2), "not older than the checkpoint of step 9");
}

/// A lookup of many ids finds each as a lookup of one does.
#[test]
fn lookups_of_many_ids_equal_single_lookups() {
    let mut fixture = TestTable::new(TableSpec::new(1 << 20));
    fixture.push_ids(1, (0..6 * LOOKUP_DISTANCE as u64).filter(|id| id % 3 != 0));
    let each: Vec<(Vec<f32>, u64)> = (0..6 * LOOKUP_DISTANCE as u64)
        .map(|id| fixture.pull(&[id]))
        .map(|(mut rows, have)| (rows.remove(0), have))
        .collect();
    for count in 0..each.len() {
        // In descending order, so that a position differs from its id.
        let ids: Vec<u64> = (0..count as u64).rev().collect();
        let (rows, have) = fixture.pull(&ids);
        assert!(rows.iter().eq(each[..count].iter().rev().map(|(row, _)| row)), "{count}");
        assert_eq!(have, each[..count].iter().map(|(_, have)| have).sum::<u64>());
    }
}

#[test]
fn a_discarded_change_has_no_effect() {
    let mut fixture = TestTable::new(TableSpec::new(1 << 20));
    fixture.push_ids(1, 0..50);
    let before = fixture.pull(&[1, 49, 50]);
    let many: Vec<(u64, f32)> = (0..900).map(|id| (id, 3.0)).collect();
    fixture.in_place = false;
    fixture.begin(2, &many).unwrap();
    assert_eq!(fixture.pull(&[1, 49, 50]), before, "dirty rows are not visible");
    fixture.table.check_invariants(&fixture.journal);
    fixture.table.discard();
    fixture.table.check_invariants(&fixture.journal);
    for in_place in [false, true] {
        fixture.in_place = in_place;
        fixture.begin(2, &many).unwrap();
        assert_eq!(fixture.pull(&[1, 49, 50]) == before, !in_place);
        // A process that ends here has changed nothing.
        fixture = fixture.reopened();
        assert_eq!(fixture.pull(&[1, 49, 50]), before);
        fixture.table.check_invariants(&fixture.journal);
    }
}

#[test]
fn rows_pinned_by_a_checkpoint_do_not_change() {
    let mut fixture = TestTable::new(TableSpec::new(100 * ROW).rows_at_once(100));
    fixture.push_ids(1, 0..100);
    let image = fixture.table.image(1);
    let read = |image: &TableImage| -> Vec<(u64, Vec<u8>)> {
        let values = image.stream(0).map(<[u8]>::to_vec);
        image.heads().map(|head| head.id).zip(values).collect()
    };
    let before = read(&image);
    assert_eq!((before.len(), image.rows()), (100, 100));
    let all: Vec<(u64, f32)> = (0..100).map(|id| (id, 1.0)).collect();
    let mut made = 0;
    while fixture.begin(2, &all).is_ok() {
        fixture.table.publish(&mut fixture.journal);
        fixture.version += 1;
        fixture.commit();
        made += 1;
        assert!(made < 10, "memory for pinned rows is bounded");
    }
    assert!(made >= 1, "pushes continue while a checkpoint is written");
    assert_eq!(read(&image), before);
    let other = std::thread::spawn(move || read(&image).len()).join().unwrap();
    assert_eq!(other, 100);
    fixture.push_ids(3, 0..100);
}

#[test]
fn a_checkpoint_makes_way_for_rows_rather_than_memory_kept_for_others() {
    let spec = TableSpec::new(1000 * ROW).rows_at_once(1000);
    let all: Vec<(u64, f32)> = (0..1000).map(|id| (id, 1.0)).collect();
    let made = |fixture: &mut TestTable| {
        fixture.push_ids(1, 0..1000);
        let image = fixture.table.image(1);
        let (made, stalled) = fixture.push_until_stalled(2, &all);
        assert!(matches!(stalled, Stalled::NoFreeBlock), "{stalled:?}");
        drop(image);
        fixture.push_ids(3, 0..1000);
        made
    };
    let budget = Budget::new(1 << 20);
    let others = budget.promise(budget.left());
    assert_eq!(made(&mut TestTable::within(spec, budget.clone())), 1);
    drop(others);
    let mut fixture = TestTable::within(spec, budget.clone());
    assert_eq!(made(&mut fixture), 2, "nobody else needs the memory");
    // It is opened again as it is, even if others need the memory now.
    let _others = budget.promise(1 << 20);
    let mut fixture = fixture.reopened();
    assert_eq!(fixture.ids().len(), 1000);
}

#[test]
fn a_checkpoint_that_ends_makes_way_only_if_that_is_enough() {
    let budget = Budget::new(1 << 30);
    let spec = TableSpec::new(100_000 * ROW).rows_at_once(50_000);
    let mut fixture = TestTable::within(spec, budget.clone());
    fixture.push_ids(1, 0..1000);
    let image = fixture.table.image(1);
    let others = budget.reserve(budget.left()).unwrap();
    let many: Vec<(u64, f32)> = (0..50_000).map(|id| (id, 1.0)).collect();
    let stalled = fixture.begin(2, &many).unwrap_err();
    let Stalled::Growth(error) = stalled else { panic!("{stalled:?}") };
    assert!(matches!(*error, StorageError::DoesNotFit { .. }), "{error:?}");
    assert_eq!(image.rows(), 1000, "it can be written meanwhile");
    drop(others);
    fixture.push(2, &many);
    assert_eq!(fixture.table.rows(), 50_000);
}

#[test]
fn records_that_a_checkpoint_has_doubled_leave_the_index_its_memory() {
    let spec = TableSpec::new(40_000 * ROW).rows_at_once(20_000);
    let need = {
        let table = TestTable::new(spec);
        let partition = &table.catalogue.partitions()[0];
        Table::need(&table.catalogue, partition, table.rule.slots().len(), 1)
    };
    // Not a byte more than what the table needs.
    let mut fixture = TestTable::within(spec, Budget::new(need.bytes()));
    fixture.push_ids(1, 0..20_000);
    let image = fixture.table.image(1);
    let all: Vec<(u64, f32)> = (0..20_000).map(|id| (id, 1.0)).collect();
    let (_, stalled) = fixture.push_until_stalled(2, &all);
    assert!(matches!(stalled, Stalled::NoFreeBlock), "{stalled:?}");
    drop(image);
    fixture.push_ids(3, 20_000..40_000);
    assert_eq!(fixture.table.rows(), 40_000);
}

#[test]
fn a_full_table_counts_rejected_rows() {
    let mut fixture = TestTable::new(TableSpec::new(100 * ROW));
    assert_eq!((fixture.table.limit(), fixture.table.rejects_when_full()), (100, true));
    fixture.push_ids(1, 0..90);
    let ids: Vec<u64> = (80..120).collect();
    let twice: Vec<u64> = ids.iter().flat_map(|&id| [id, id]).collect();
    assert_eq!(fixture.table.count_new(&fixture.journal, &twice, false), 30);
    // A push that is applied nevertheless, as a synchronous step is, loses only the rows that do
    // not fit.
    fixture.table.take_counts();
    fixture.push_ids(2, 80..120);
    let counts = fixture.table.take_counts();
    assert_eq!((counts.hits, counts.admitted, counts.turned_away), (10, 10, 20));
    assert_eq!((fixture.table.rows(), fixture.has(99), fixture.has(100)), (100, true, false));
}

#[test]
fn the_least_recently_used_rows_are_evicted() {
    let spec = TableSpec::new(100 * ROW).eviction(Eviction::LeastRecent);
    let mut fixture = TestTable::new(spec);
    fixture.push_ids(1, 0..100);
    for step in 2..40 {
        // Half of the rows are used in every push, along with some new ones.
        fixture.push_ids(step, (0..50).chain(1000 * step..1000 * step + 10));
        assert_eq!(fixture.table.rows(), 100);
    }
    assert!((0..50).all(|id| fixture.has(id)), "recently used rows stay");
    assert!((50..100).all(|id| !fixture.has(id)));
    let counts = fixture.table.take_counts();
    assert_eq!((counts.evicted, counts.turned_away), (380, 0));
    // A push of more rows than the limit does not evict its own rows.
    fixture.push_ids(40, 0..150);
    assert_eq!(fixture.table.rows(), 100);
    let fixture = fixture.reopened();
    assert!((0..50).all(|id| fixture.has(id)));
}

#[test]
fn the_least_frequently_used_rows_are_evicted() {
    let spec = TableSpec::new(100 * ROW).eviction(Eviction::LeastFrequent);
    let mut fixture = TestTable::new(spec);
    (1..4).for_each(|step| fixture.push_ids(step, 0..50));
    for step in 4..30 {
        fixture.push_ids(step, 1000 * step..1000 * step + 20);
    }
    assert!((0..50).all(|id| fixture.has(id)), "frequently used rows stay, however old");
}

#[test]
fn unused_rows_expire() {
    let mut fixture = TestTable::new(TableSpec::new(1 << 20).expire_after(10));
    fixture.push_ids(1, 0..1000);
    for step in 2..=30 {
        fixture.push_ids(step, 0..10);
    }
    assert_eq!(fixture.ids(), (0..10).collect());
    let mut fixture = fixture.reopened();
    fixture.push_ids(31, 20..30);
    assert_eq!((fixture.table.rows(), fixture.has(20)), (20, true));
    assert_eq!(
        fixture.pull(&[500]).0[0],
        fixture.first(500),
        "an expired row starts with its initial values"
    );
}

#[test]
fn rows_are_admitted_after_some_pushes() {
    let spec = TableSpec::new(1000 * ROW).admission(RowAdmission::After { pushes: 3 });
    let mut fixture = TestTable::new(spec);
    fixture.push_ids(1, 0..100);
    fixture.push_ids(2, 0..50);
    assert_eq!((fixture.table.rows(), fixture.table.candidates), (0, 100));
    assert_eq!(fixture.pull(&[7]).0[0], fixture.first(7));
    let mut fixture = fixture.reopened();
    assert_eq!(fixture.table.candidates, 100);
    let new = |ids: &[u64]| fixture.table.count_new(&fixture.journal, ids, false);
    assert_eq!((new(&[7, 70, 700]), new(&[70, 70, 700, 700, 700])), (1, 2));
    fixture.push_ids(3, 0..100);
    assert_eq!((fixture.ids(), fixture.table.candidates), ((0..50).collect(), 50));
    assert_ne!(fixture.pull(&[7]).0[0], fixture.first(7), "its third gradient counts");
    let counts = fixture.table.take_counts();
    assert_eq!((counts.admitted, counts.turned_away), (50, 50));
    // The number of candidates is bounded.
    for round in 1..100 {
        fixture.push_ids(4, 10_000 * round..10_000 * round + 100);
    }
    assert_eq!(fixture.table.candidates, 1000);
}

#[test]
fn rows_are_admitted_by_chance() {
    let spec = TableSpec::new(1 << 20).admission(RowAdmission::Chance { probability: 0.3 });
    let mut fixture = TestTable::new(spec);
    fixture.push_ids(1, 0..1000);
    assert!((240..360).contains(&fixture.table.rows()), "{}", fixture.table.rows());
    (2..30).for_each(|step| fixture.push_ids(step, 0..1000));
    assert!(fixture.table.rows() > 995, "every push draws again");
}

/// An id that chance may admit counts as new, so that the push is refused up front instead of
/// losing its row when it is drawn.
#[test]
fn ids_admitted_by_chance_count_as_new() {
    let spec = TableSpec::new(100 * ROW).admission(RowAdmission::Chance { probability: 0.5 });
    let mut fixture = TestTable::new(spec);
    assert!(fixture.table.rejects_when_full());
    fixture.push_ids(1, 0..10);
    let absent = (0..10).filter(|&id| !fixture.has(id)).count() as u64;
    assert!((1..10).contains(&absent));
    let ids: Vec<u64> = (0..50).collect();
    assert_eq!(fixture.table.count_new(&fixture.journal, &ids, false), absent + 40);
}

#[test]
fn rows_are_restored_from_an_image() {
    let spec = TableSpec::new(1 << 20);
    let mut fixture = TestTable::new(spec);
    (1..8).for_each(|step| fixture.push_ids(step, (0..700 * step).step_by(step as usize)));
    let image = fixture.table.image(7);
    let mut other = TestTable::new(spec);
    let streams: Vec<Vec<&[u8]>> = (0..2).map(|stream| image.stream(stream).collect()).collect();
    for (row, head) in image.heads().enumerate() {
        let row: Vec<&[u8]> = streams.iter().map(|stream| stream[row]).collect();
        other.table.restore_row(head, &row).unwrap();
    }
    let first = image.heads().next().unwrap();
    other.table.restore_row(first, &[&[0; 12], &[0; 12]]).unwrap();
    other.table.restored(&mut other.journal).unwrap();
    other.commit();
    let ids: Vec<u64> = fixture.ids().into_iter().collect();
    assert_eq!(fixture.pull(&ids), other.pull(&ids));
    let mut other = other.reopened();
    let heads = |fixture: &mut TestTable| -> BTreeMap<u64, RowHead> {
        fixture.table.image(0).heads().map(|head| (head.id, head)).collect()
    };
    assert_eq!(heads(&mut fixture), heads(&mut other));
    fixture.push_ids(9, 0..100);
    other.version = fixture.version - 1;
    other.push_ids(9, 0..100);
    assert_eq!(fixture.pull(&ids), other.pull(&ids), "slots too");
    // A smaller table rejects the rows that do not fit.
    let mut small = TestTable::new(TableSpec::new(10 * ROW));
    let refused =
        image.heads().find_map(|head| small.table.restore_row(head, &[&[0; 12], &[0; 12]]).err());
    assert!(matches!(refused, Some(crate::StorageError::DoesNotFit { need: 11, limit: 10 })));
}

#[test]
fn damaged_files_are_rejected() {
    let mut fixture = TestTable::new(TableSpec::new(1 << 20));
    fixture.push_ids(1, 0..300);
    let TestTable { arena, catalogue, journal, table, rule, .. } = fixture;
    drop((journal, table));
    let ArenaStorage::TestFiles(test_files) = &arena.storage else { unreachable!() };
    let mut files = test_files.contents();
    let stamp = arena.stamp;
    let open = |files: &BTreeMap<String, Content>| {
        let arena =
            Arena { storage: ArenaStorage::TestFiles(TestFiles::with(files.clone())), stamp };
        let control = arena.open(Kind::Control, 0, None)?;
        let mut journal = Journal::open(&arena, control, PlantedBugs::default())?;
        journal.first_cell()?;
        journal.use_tables(arena.open(Kind::Tables, 1, None)?, 1);
        Table::map_index(&arena, 1, 0, &mut journal)?;
        journal.redo()?;
        let inputs = inputs(&arena, &catalogue, &Budget::new(1 << 30), &rule, &[]);
        Table::open(inputs, &mut journal).map(|table| table.rows())
    };
    assert_eq!(open(&files).unwrap(), 300);
    let mut refused = 0;
    for name in ["index-1-0", "rows-1-0-0"] {
        let whole = files[name].to_vec();
        for at in (0..whole.len()).step_by(89) {
            let mut bytes = whole.clone();
            bytes[at] ^= 0x55;
            files.insert(name.to_owned(), bytes.into());
            match open(&files) {
                Ok(rows) => assert_eq!(rows, 300, "byte {at} of {name}"),
                Err(crate::StorageError::Corrupt { .. }) => refused += 1,
                Err(error) => panic!("byte {at} of {name}: {error}"),
            }
        }
        for length in [0, 100, PAGE_BYTES, PAGE_BYTES + 8, 3 * PAGE_BYTES] {
            files.insert(name.to_owned(), whole[..length].to_vec().into());
            assert!(open(&files).is_err(), "{name} of {length} bytes");
        }
        files.insert(name.to_owned(), whole.into());
    }
    assert!(refused > 200, "{refused}");
    assert_eq!(open(&files).unwrap(), 300);
}

/// A synchronous step applies its rows in pieces of any size, smaller or larger than a tile.
#[test]
fn undo_stays_within_its_reservation() {
    let mut fixture = TestTable::new(TableSpec::new(1 << 24));
    let ids: Vec<u64> = (0..3000).collect();
    fixture.push_ids(1, ids.iter().copied());
    for each in [1, 7, 341, 342, 683, 1365, 3000] {
        fixture.table.begin(&mut fixture.journal, &ids, 2, fixture.version + 1, false).unwrap();
        let need = fixture.table.undo_need().unwrap();
        fixture.undo.begin(fixture.version + 1);
        fixture.table.settle(true);
        let at = ApplyAt::new(fixture.version + 1, 2);
        let input = vec![0.0_f32; each * WIDTH];
        let change = Change::Gradient { optimizer: &fixture.rule, at, dtype: DType::F32 };
        for start in (0..ids.len()).step_by(each) {
            let places = start..ids.len().min(start + each);
            let input = bytemuck::cast_slice(&input[..places.len() * WIDTH]);
            fixture.table.change_rows(
                change,
                places,
                input,
                &mut fixture.undo,
                PlantedBugs::default(),
            );
        }
        let used = fixture.undo.used_bytes();
        assert!(used <= need && need < 2 * used, "{used} of {need} bytes, {each} at a time");
        fixture.table.publish(&mut fixture.journal);
        fixture.version += 1;
        fixture.commit();
    }
}

#[test]
fn malformed_undo_rows_are_rejected() {
    let mut fixture = TestTable::new(TableSpec::new(1 << 20));
    fixture.push_ids(1, 0..10);
    let record = fixture.table.records.shape.record_bytes();
    let row = |block, start, bytes| UndoRow {
        table: Some(0),
        stream: 0,
        block,
        start,
        bytes: vec![0; bytes],
    };
    let count = fixture.table.records.count() as u32;
    for wrong in [row(count, 0, record), row(0, 8, record - 8), row(0, 0, record + 8)] {
        assert!(fixture.table.apply_undo(&[wrong]).is_err());
    }
    let other = UndoRow { table: Some(1), ..row(0, 0, record) };
    fixture.table.apply_undo(&[other]).unwrap();
    assert!(fixture.has(0), "undo rows of another table are ignored");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// After any pushes, discards and restarts, each row equals that of a map of rows trained one
    /// by one.
    #[test]
    fn a_table_equals_a_map_of_rows(
        pushes in prop::collection::vec(
            (prop::collection::btree_map(0u64..2000, -2.0f32..2.0, 1..400), 0u8..8),
            1..12,
        ),
        spread in prop::sample::select(vec![1u64, 0x9e37_79b9_7f4a_7c15]),
    ) {
        let mut fixture = TestTable::new(TableSpec::new(1 << 24));
        let mut model: BTreeMap<u64, (Vec<f32>, Vec<f32>)> = BTreeMap::new();
        for (step, (rows, what)) in (1..).zip(pushes) {
            let rows = rows.into_iter().map(|(id, gradient)| (id.wrapping_mul(spread), gradient));
            let rows: BTreeMap<u64, f32> = rows.collect();
            let rows: Vec<(u64, f32)> = rows.into_iter().collect();
            // The change is discarded or, if it is in place, abandoned by a restart, which undoes
            // it.
            fixture.in_place = what % 2 == 0;
            if (1..4).contains(&what) {
                fixture.begin(step, &rows).unwrap();
                if fixture.in_place {
                    fixture = fixture.reopened();
                } else {
                    fixture.table.discard();
                }
            }
            fixture.push(step, &rows);
            for (id, gradient) in rows {
                let first = fixture.first(id);
                let (values, sums) = model.entry(id).or_insert((first, vec![0.1; WIDTH]));
                let gradient = [gradient; WIDTH];
                let at = ApplyAt::new(fixture.version, step);
                let slots = &mut [&mut sums[..]];
                let gradient = &gradient[..];
                fixture.rule.apply_f32(at, pushpull_optim::optimizer::Run { values, slots, gradient });
            }
            if what == 0 {
                fixture = fixture.reopened();
            }
        }
        let ids: Vec<u64> = model.keys().copied().collect();
        let (rows, have) = fixture.pull(&ids);
        prop_assert_eq!(have, ids.len() as u64);
        prop_assert_eq!(fixture.table.rows(), have);
        for (row, (id, (values, _))) in rows.iter().zip(&model) {
            prop_assert_eq!(row, values, "row {}", id);
        }
    }
}
