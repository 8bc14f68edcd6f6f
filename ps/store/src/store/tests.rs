//! Tests of blocks, snapshots and slots in isolation.

#![allow(clippy::single_range_in_vec_init, reason = "a change of one range is what is meant")]

use std::ops::AddAssign;
use std::time::Duration;

use proptest::prelude::*;
use pushpull_common::rows::{Numbers, encode_numbers};
use pushpull_common::table::TableSpec;
use pushpull_common::tensor::DType;
use pushpull_common::variable::VariableSpec;
use pushpull_optim::optimizer::{
    Adagrad, Adam, ApplyAt, Lamb, Optimizer, OptimizerRules, OptimizerSlot, RmsProp, Run, Sgd, Sums,
};

use super::*;
use crate::arena::Budget;
use crate::change::ByteSource;
use crate::measure::{alone, holding};
use crate::testing::full_disk::FullDisk;
use pushpull_optim::optimizer::SharedRun;

const BLOCK: usize = 1024;
const ELEMENTS: u64 = 3 * BLOCK as u64 / 4;

const ADD: Change<'static> = Change::Add { dtype: DType::F32 };

fn gradient_of(optimizer: &dyn Optimizer, at: ApplyAt) -> Change<'_> {
    Change::Gradient { optimizer, at, dtype: DType::F32 }
}

/// A store and its journal.
pub(super) struct StoreFixture {
    store: Store,
    journal: Journal,
    version: u64,
}

/// Creates a store of three blocks of f32, of which `pinned` free blocks may be pinned.
fn fixture(optimizer: impl Optimizer, pinned: u64) -> StoreFixture {
    let pin_bytes = pinned * BLOCK as u64;
    let (store, mut journal) =
        alone(ELEMENTS, Arc::new(optimizer), BLOCK, pin_bytes, true).unwrap();
    let geometry = store.geometry();
    assert_eq!((geometry.logical_blocks, geometry.pinned as u64), (3, pinned));
    store.seal(&mut journal);
    journal.commit();
    StoreFixture { store, journal, version: 0 }
}

impl StoreFixture {
    /// Applies `change` to these ranges and commits.
    fn change(
        &mut self,
        ranges: &[Range<u64>],
        mut change: impl FnMut(&mut Store, Range<u64>) -> Result<(), NoFreeBlock>,
    ) -> Result<(), NoFreeBlock> {
        self.store.begin(ranges, std::iter::empty(), self.version + 1)?;
        for range in ranges {
            change(&mut self.store, range.clone())?;
        }
        self.store.publish(&mut self.journal);
        self.version += 1;
        self.journal.commit();
        self.store.committed(ValueCounts { version: self.version, ..ValueCounts::default() });
        self.store.check_invariants();
        self.store.verify(&self.journal).unwrap();
        Ok(())
    }

    fn add(&mut self, range: Range<u64>, more: f32) -> Result<(), NoFreeBlock> {
        let bytes = vec![more; (range.end - range.start) as usize / 4];
        let bytes: &[u8] = bytemuck::cast_slice(&bytes);
        self.change(&[range], |store, range| store.change(ADD, range, bytes.into()))
    }

    fn all(&self) -> Vec<f32> {
        let range = 0..4 * ELEMENTS;
        read(&self.store.snapshot(std::slice::from_ref(&range)), range)
    }
}

fn read(snapshot: &Snapshot, range: Range<u64>) -> Vec<f32> {
    let pieces = snapshot.pieces(range);
    pieces.flat_map(|piece| bytemuck::cast_slice::<u8, f32>(piece).to_vec()).collect()
}

#[test]
fn a_snapshot_keeps_its_version_and_delays_changes_only_without_free_blocks() {
    let mut fixture = fixture(Sgd::new(1.0), 2);
    let all = 0..4 * ELEMENTS;
    let first = fixture.store.snapshot(&[0..8, all.end - 8..all.end]);
    fixture.add(all.clone(), 1.0).unwrap();
    assert_eq!(read(&first, 0..8), [0.0; 2]);
    // Two blocks are pinned, and the geometry allows two. Three are left for a change.
    fixture.add(all.clone(), 1.0).unwrap();
    let second = fixture.store.snapshot(std::slice::from_ref(&all));
    fixture.add(all.clone(), 1.0).unwrap();
    assert_eq!(fixture.add(all.clone(), 1.0), Err(NoFreeBlock));
    assert!(
        fixture.all().iter().all(|&value| value == 3.0),
        "a change is applied completely or not at all"
    );
    assert!(read(&second, all.clone()).iter().all(|&value| value == 2.0));
    fixture.store.check_invariants();
    drop(first);
    assert_eq!(fixture.add(all.clone(), 1.0), Err(NoFreeBlock), "three blocks are needed");
    fixture.add(0..8 + BLOCK as u64, 1.0).unwrap();
    drop(second);
    fixture.add(all.clone(), 1.0).unwrap();
    assert_eq!(fixture.all()[0], 5.0);
    assert_eq!(fixture.all()[ELEMENTS as usize - 1], 4.0);
}

#[test]
fn blocks_beyond_those_of_a_change_have_memory_only_while_others_are_pinned() {
    let mut fixture = fixture(Sgd::new(1.0), 3);
    let block_bytes = (BLOCK + crate::arena::GAP_BYTES) as u64;
    let budget = Budget::new(2 * block_bytes);
    fixture.store.values.limit_memory(&budget);
    let reserved = fixture.store.reserved();
    let all = 0..4 * ELEMENTS;
    fixture.add(all.clone(), 1.0).unwrap();
    assert_eq!(fixture.store.reserved(), reserved, "nothing is pinned");
    let pull = fixture.store.snapshot(std::slice::from_ref(&all));
    fixture.add(all.clone(), 1.0).unwrap();
    assert_eq!(fixture.add(all.clone(), 1.0), Err(NoFreeBlock), "there is memory for two blocks");
    assert_eq!(fixture.store.reserved(), reserved + 2 * block_bytes);
    fixture.add(0..2 * BLOCK as u64, 1.0).unwrap();
    assert_eq!((read(&pull, 0..4), fixture.all()[0]), (vec![1.0], 3.0));
    drop(pull);
    fixture.add(all.clone(), 1.0).unwrap();

    let mut now = Instant::now();
    for (seconds, blocks) in [(0, 2), (4, 2), (1, 0), (9, 0)] {
        now += Duration::from_secs(seconds);
        fixture.store.pass_time(now, false);
        fixture.store.check_invariants();
        assert_eq!(fixture.store.reserved(), reserved + blocks * block_bytes, "{seconds} s");
    }
    assert_eq!(budget.left(), 2 * block_bytes);
    fixture.add(all.clone(), 1.0).unwrap();
    assert_eq!(fixture.all()[0], 5.0);
}

#[test]
fn a_full_file_system_is_asked_for_blocks_once_a_second() {
    let mut fixture = fixture(Sgd::new(1.0), 3);
    let budget = Budget::new(u64::MAX);
    fixture.store.values.limit_memory(&budget);
    let all = 0..4 * ELEMENTS;
    let pull = fixture.store.snapshot(std::slice::from_ref(&all));
    fixture.add(all.clone(), 1.0).unwrap();
    let disk = FullDisk::fill();
    let mut now = Instant::now();
    for second in 1..=3 {
        for _ in 0..20 {
            assert_eq!(fixture.add(all.clone(), 1.0), Err(NoFreeBlock));
            fixture.store.pass_time(now, true);
            now += Duration::from_millis(50);
        }
        assert_eq!((disk.refused(), budget.left()), (second, u64::MAX));
        fixture.store.pass_time(now, true);
    }
    drop(disk);
    fixture.add(all.clone(), 1.0).unwrap();
    assert_eq!((read(&pull, 0..4), fixture.all()[0]), (vec![0.0], 2.0));
    fixture.store.check_invariants();
}

#[test]
fn blocks_that_changes_keep_using_keep_their_memory() {
    let mut fixture = fixture(Sgd::new(1.0), 3);
    let budget = Budget::new(u64::MAX);
    fixture.store.values.limit_memory(&budget);
    let all = 0..4 * ELEMENTS;
    let mut now = Instant::now();
    for _ in 0..20 {
        let pull = fixture.store.snapshot(std::slice::from_ref(&all));
        fixture.add(all.clone(), 1.0).unwrap();
        fixture.add(all.clone(), 1.0).unwrap();
        drop(pull);
        now += Duration::from_secs(1);
        fixture.store.pass_time(now, false);
        let taken = u64::MAX - budget.left();
        assert_eq!(taken, 3 * (BLOCK + crate::arena::GAP_BYTES) as u64);
    }
}

#[test]
fn small_changes_are_made_in_place_unless_the_blocks_are_read() {
    let mut fixture = fixture(Sgd::new(1.0), 2);
    let committed = |fixture: &StoreFixture| {
        (0..3).map(|logical| fixture.store.values.committed_block(logical)).collect::<Vec<_>>()
    };
    let before = committed(&fixture);
    fixture.add(BLOCK as u64 - 8..BLOCK as u64 + 8, 1.0).unwrap();
    assert_eq!(committed(&fixture), before, "no block has moved");
    let pull = fixture.store.snapshot(&[0..8]);
    fixture.add(0..8, 1.0).unwrap();
    assert_ne!(committed(&fixture), before, "a pinned block is not written");
    assert_eq!((read(&pull, 0..8), fixture.all()[1]), (vec![0.0; 2], 1.0));
    assert_eq!(fixture.all().iter().sum::<f32>(), 6.0);
}

#[test]
fn a_discarded_change_has_no_effect() {
    let range = 0..4 * ELEMENTS;
    let gradient = vec![1_f32; ELEMENTS as usize];
    let bytes: &[u8] = bytemuck::cast_slice(&gradient);
    let at = ApplyAt::new(1, 0);
    let rule = Adam::new(0.1);
    let change =
        |store: &mut Store, range| store.change(gradient_of(&rule, at), range, bytes.into());
    let committed = [0, 1, 2].map(|discarded| {
        let mut fixture = fixture(Adam::new(0.1), 1);
        for _ in 0..discarded {
            fixture.store.begin(std::slice::from_ref(&range), std::iter::empty(), 1).unwrap();
            change(&mut fixture.store, range.clone()).unwrap();
            fixture.store.discard();
            fixture.store.check_invariants();
            fixture.store.verify(&fixture.journal).unwrap();
            assert!(fixture.all().iter().all(|&value| value == 0.0));
        }
        fixture.change(std::slice::from_ref(&range), change).unwrap();
        [0, 1, 2].map(|logical| fixture.store.values.committed_block(logical))
    });
    // The order in which blocks are written does not change either.
    assert!(committed.iter().all(|it| *it == committed[0]), "{committed:?}");
}

#[test]
fn a_snapshot_is_readable_across_block_boundaries() {
    let mut fixture = fixture(Sgd::new(1.0), 1);
    let counted: Vec<f32> = (0..ELEMENTS).map(|index| index as f32).collect();
    let bytes: &[u8] = bytemuck::cast_slice(&counted);
    fixture
        .change(&[0..4 * ELEMENTS], |store, range| {
            store.change(Change::Assign, range, bytes.into())
        })
        .unwrap();
    let block = BLOCK as u64;
    let ranges = [8..16, block - 8..block + 8, 3 * block - 8..3 * block];
    let snapshot = fixture.store.snapshot(&ranges);
    for range in ranges {
        let expected = &counted[range.start as usize / 4..range.end as usize / 4];
        assert_eq!(read(&snapshot, range), expected);
    }
    assert_eq!(snapshot.logical, [0, 1, 2], "each block is pinned once");
    assert!(read(&snapshot, 8..8).is_empty());
}

#[test]
fn values_and_slots_match_the_rule_on_every_write_path() {
    let rule = Adam::new(0.1);
    let mut values = vec![0_f32; ELEMENTS as usize];
    let mut m = vec![0_f32; ELEMENTS as usize];
    let mut v = vec![0_f32; ELEMENTS as usize];
    let mut fixtures: Vec<StoreFixture> = [false, true]
        .map(|past_cache| {
            let mut fixture = fixture(rule.clone(), 1);
            fixture.store.past_cache = past_cache;
            fixture
        })
        .into();
    // Whole, inside blocks, across block boundaries, and small enough for a change in place.
    let ranges = [0..ELEMENTS, 2..ELEMENTS - 2, 250..262, 100..500, 4..6];
    for (count, range) in (1..).zip(ranges.iter().cycle().take(15)) {
        let elements = range.start as usize..range.end as usize;
        let gradient: Vec<f32> =
            elements.clone().map(|i| (i as f32).sin() + count as f32).collect();
        let at = ApplyAt::new(count, 0);
        let slots: &mut [&mut [f32]] = &mut [&mut m[elements.clone()], &mut v[elements.clone()]];
        rule.apply_f32(at, Run { values: &mut values[elements], slots, gradient: &gradient });
        let bytes = 4 * range.start..4 * range.end;
        for fixture in &mut fixtures {
            let gradient: &[u8] = bytemuck::cast_slice(&gradient);
            fixture
                .change(std::slice::from_ref(&bytes), |store, range| {
                    store.change(gradient_of(&rule, at), range, gradient.into())
                })
                .unwrap();
            assert_eq!(fixture.all(), values);
            let pool = fixture.store.slots.as_ref().unwrap();
            for (index, expected) in [&m, &v].into_iter().enumerate() {
                for (logical, expected) in expected.chunks(BLOCK / 4).enumerate() {
                    let slot = pool.blocks.read_part(pool.committed_block(logical), index);
                    assert_eq!(bytemuck::cast_slice::<u8, f32>(slot), expected);
                }
            }
        }
    }
}

/// A byte source over a slice.
struct StreamedBytes<'a>(&'a [u8]);

impl ByteSource for StreamedBytes<'_> {
    fn fill(&mut self, to: &mut [u8]) {
        let (head, rest) = self.0.split_at(to.len());
        to.copy_from_slice(head);
        self.0 = rest;
    }
}

/// Covers rules with and without a streaming loop, with sums over the whole variable, and a change
/// without a rule.
#[test]
fn a_byte_source_has_the_effect_of_a_slice() {
    const BLOCK: usize = 8 << 10;
    let rules: [Arc<dyn Optimizer>; 4] = [
        Arc::new(Sgd::new(0.1)),
        Arc::new(Adam::new(0.1)),
        Arc::new(Lamb::new(0.1)),
        Arc::new(NonzeroSlot),
    ];
    for (rule, past_cache) in rules.iter().flat_map(|rule| [(rule, false), (rule, true)]) {
        let elements = 3 * BLOCK as u64 / 4;
        let mut fixtures = [(), ()].map(|()| {
            let (mut store, mut journal) = alone(elements, rule.clone(), BLOCK, 0, true).unwrap();
            store.past_cache = past_cache;
            store.seal(&mut journal);
            journal.commit();
            StoreFixture { store, journal, version: 0 }
        });
        // Whole, across boundaries of blocks and chunks, twice in one block, and in place.
        let ranges = [0..elements, 2..elements - 2, 500..1600, 2040..2056, 4..6];
        for (count, range) in (1..).zip(ranges.iter().cycle().take(10)) {
            let gradient: Vec<f32> =
                range.clone().map(|i| (i as f32).sin() + count as f32).collect();
            let bytes = bytemuck::cast_slice(&gradient);
            let at = ApplyAt::new(count, 0);
            for (fixture, is_streamed) in fixtures.iter_mut().zip([false, true]) {
                fixture
                    .change(&[4 * range.start..4 * range.end], |store, range| {
                        let mut sums = Sums::default();
                        let mut sources = [StreamedBytes(bytes), StreamedBytes(bytes)];
                        let [summed, applied] =
                            sources.each_mut().map(|source| match is_streamed {
                                true => ChangeInput::Source(source),
                                false => ChangeInput::Bytes(bytes),
                            });
                        store.add_up(gradient_of(&**rule, at), range.clone(), summed, &mut sums);
                        let at = at.with_sums(sums.totals());
                        store.change(gradient_of(&**rule, at), range.clone(), applied)?;
                        let added = &mut StreamedBytes(bytes);
                        let added = if is_streamed {
                            ChangeInput::Source(added)
                        } else {
                            ChangeInput::Bytes(bytes)
                        };
                        store.change(ADD, range, added)
                    })
                    .unwrap();
            }
            let [sliced, streamed] = &fixtures;
            assert_eq!(sliced.store.contents(), streamed.store.contents(), "{rule:?}, {range:?}");
        }
        assert!(
            fixtures[0].store.contents()[0].iter().any(|&byte| byte != 0),
            "{rule:?} has an effect"
        );
    }
}

/// A rule whose slot does not start at zero.
#[derive(Debug)]
struct NonzeroSlot;

impl Optimizer for NonzeroSlot {
    fn kind(&self) -> &'static str {
        "started"
    }

    fn slots(&self) -> &[OptimizerSlot] {
        const { &[OptimizerSlot::new("s", 0.5)] }
    }

    fn apply_f32(&self, _: ApplyAt, run: Run<'_, f32>) {
        run.values.copy_from_slice(run.slots[0]);
    }

    fn apply_f64(&self, _: ApplyAt, run: Run<'_, f64>) {
        run.values.copy_from_slice(run.slots[0]);
    }
}

#[test]
fn a_slot_may_start_at_any_value() {
    let mut fixture = fixture(NonzeroSlot, 1);
    let gradient = vec![0; 4 * ELEMENTS as usize];
    fixture
        .change(&[0..4 * ELEMENTS], |store, range| {
            store.change(gradient_of(&NonzeroSlot, ApplyAt::new(1, 0)), range, gradient[..].into())
        })
        .unwrap();
    assert!(fixture.all().iter().all(|&value| value == 0.5));
}

/// Rules with two, no and one slot, for variables that share blocks. The last one is pushed by
/// rows.
#[test]
fn each_variable_has_the_slots_of_its_own_rule() {
    let trained_by: [Arc<dyn Optimizer>; 3] =
        [Arc::new(Adam::new(0.1)), Arc::new(Sgd::new(0.5)), Arc::new(Adagrad::new(0.25))];
    let mut rules = OptimizerRules::new(trained_by[0].clone());
    rules.optimizer_for("b".into(), trained_by[1].clone());
    rules.optimizer_for("c".into(), trained_by[2].clone());
    let variable = |name, shape| VariableSpec::f32(name, shape).unwrap();
    for past_cache in [false, true] {
        let table = variable("c", [50, 4]).sparse();
        let variables = vec![variable("a", [100, 3]), variable("b", [100, 3]), table];
        let pin_bytes = BLOCK as u64;
        let (mut store, mut journal) =
            holding(variables, rules.clone(), BLOCK, pin_bytes, true).unwrap();
        store.seal(&mut journal);
        journal.commit();
        store.past_cache = past_cache;
        let partitions = store.layout().partitions().to_vec();
        let mut fixture = StoreFixture { store, journal, version: 0 };
        let mut expected: Vec<Vec<Vec<f32>>> = Vec::new();
        for (rule, partition) in trained_by.iter().zip(&partitions) {
            let first = rule.slots().iter().map(|slot| slot.initial as f32);
            let streams = std::iter::once(0.0).chain(first);
            expected.push(streams.map(|value| vec![value; partition.bytes as usize / 4]).collect());
        }
        for count in 1..=6 {
            let at = ApplyAt::new(count, 0);
            for ((rule, partition), streams) in
                trained_by.iter().zip(&partitions).zip(&mut expected)
            {
                // The whole variable, or so few rows that they are changed in place.
                let row_bytes = partition.row_bytes();
                let rows = if count % 2 == 0 { 0..partition.row_count() } else { count..count + 2 };
                let elements =
                    (rows.start * row_bytes / 4) as usize..(rows.end * row_bytes / 4) as usize;
                let gradient: Vec<f32> = elements.clone().map(|i| (i as f32).cos()).collect();
                let mut streams = streams.iter_mut().map(|stream| &mut stream[elements.clone()]);
                let values = streams.next().unwrap();
                let slots = &mut streams.collect::<Vec<_>>()[..];
                rule.apply_f32(at, Run { values, slots, gradient: &gradient });
                let range = partition.offset + rows.start * row_bytes
                    ..partition.offset + rows.end * row_bytes;
                let change = gradient_of(&**rule, at);
                let rows: Vec<u32> = (rows.start as u32..rows.end as u32).collect();
                fixture
                    .change(&[range], |store, range| match partition.is_sparse() {
                        true => {
                            let input = bytemuck::cast_slice(&gradient);
                            store.change_rows(change, partition, &rows, input)
                        }
                        false => {
                            let input: &[u8] = bytemuck::cast_slice(&gradient);
                            store.change(change, range, input.into())
                        }
                    })
                    .unwrap();
            }
        }
        let contents = fixture.store.contents();
        assert_eq!(contents.len(), 3, "values, and the slots of the rule that has most");
        for (partition, streams) in partitions.iter().zip(&expected) {
            let bytes = partition.offset as usize..(partition.offset + partition.bytes) as usize;
            for (index, expected) in streams.iter().enumerate() {
                let found: &[f32] = bytemuck::cast_slice(&contents[index][bytes.clone()]);
                assert_eq!(found, expected, "stream {index} of {:?}", partition.variable);
            }
        }
    }
}

/// A rule with more slots than most, each with a different initial value.
#[derive(Debug)]
struct FiveSlots;

impl FiveSlots {
    fn apply<T: Copy + AddAssign>(run: Run<'_, T>) {
        for (i, value) in run.values.iter_mut().enumerate() {
            for slot in run.slots.iter_mut() {
                slot[i] += run.gradient[i];
                *value += slot[i];
            }
        }
    }
}

impl Optimizer for FiveSlots {
    fn kind(&self) -> &'static str {
        "five slots"
    }

    fn slots(&self) -> &[OptimizerSlot] {
        const {
            &[
                OptimizerSlot::new("a", 1.0),
                OptimizerSlot::new("b", 2.0),
                OptimizerSlot::new("c", 3.0),
                OptimizerSlot::new("d", 4.0),
                OptimizerSlot::new("e", 5.0),
            ]
        }
    }

    fn apply_f32(&self, _: ApplyAt, run: Run<'_, f32>) {
        FiveSlots::apply(run);
    }

    fn apply_f64(&self, _: ApplyAt, run: Run<'_, f64>) {
        FiveSlots::apply(run);
    }
}

/// Returns rules for every number of slots that has its own loop, and one with more.
fn rules_by_slots() -> [Arc<dyn Optimizer>; 5] {
    let centered = RmsProp::new(0.1).centered().momentum(0.9);
    let rules: [Arc<dyn Optimizer>; 5] = [
        Arc::new(Sgd::new(0.1)),
        Arc::new(Adagrad::new(0.1)),
        Arc::new(Adam::new(0.1)),
        Arc::new(centered),
        Arc::new(FiveSlots),
    ];
    assert!(rules.iter().map(|rule| rule.slots().len()).eq([0, 1, 2, 3, 5]));
    rules
}

/// The rows are far apart and cross block boundaries, and fill several tiles.
#[test]
fn many_rows_in_place_match_the_rule() {
    rules_by_slots().into_iter().for_each(check_many_rows);
}

fn check_many_rows(rule: Arc<dyn Optimizer>) {
    const ROWS: u64 = 20_000;
    let table = VariableSpec::f32("t", [ROWS, 5]).unwrap().sparse();
    let rules = OptimizerRules::new(rule.clone());
    let (store, journal) = holding(vec![table], rules, BLOCK, BLOCK as u64, false).unwrap();
    let partition = store.layout().partitions()[0].clone();
    let mut fixture = StoreFixture { store, journal, version: 0 };
    let rows: Vec<u32> = (0..ROWS as u32).step_by(25).collect();
    let gradient: Vec<f32> = (0..5 * rows.len()).map(|i| (i as f32).sin()).collect();
    let bytes: &[u8] = bytemuck::cast_slice(&gradient);
    let committed = |fixture: &StoreFixture| {
        (0..fixture.store.values.logical_blocks())
            .map(|p| fixture.store.values.committed_block(p))
            .sum()
    };
    let before: u32 = committed(&fixture);
    let first: Vec<f32> =
        std::iter::once(0.0).chain(rule.slots().iter().map(|slot| slot.initial as f32)).collect();
    let mut expected: Vec<Vec<f32>> =
        first.iter().map(|&first| vec![first; gradient.len()]).collect();
    for count in 1..=2 {
        let touched = || std::iter::once((&partition, &rows[..]));
        let need = fixture.store.undo_need(&[], touched(), &mut Vec::new());
        fixture.store.begin(&[], touched(), count).unwrap();
        assert!(fixture.store.is_in_place());
        let at = ApplyAt::new(count, 0);
        fixture.store.change_rows(gradient_of(&*rule, at), &partition, &rows, bytes).unwrap();
        assert!(fixture.store.undo.used_bytes() <= need, "the need bounds what is recorded");
        let recorded = fixture.store.undo.rows(count - 1).unwrap();
        let old_contents = |stream| recorded.iter().filter(move |row| row.stream == stream);
        for (stream, expected) in expected.iter().enumerate() {
            let old_contents: Vec<u8> =
                old_contents(stream).flat_map(|row| row.bytes.clone()).collect();
            assert!(
                old_contents == bytemuck::cast_slice::<f32, u8>(expected),
                "{rule:?}, stream {stream}"
            );
        }
        fixture.store.publish(&mut fixture.journal);
        fixture.journal.commit();
        fixture.store.committed(ValueCounts::default());
        let mut streams = expected.iter_mut().map(Vec::as_mut_slice);
        let values = streams.next().unwrap();
        let slots = &mut streams.collect::<Vec<_>>()[..];
        rule.apply_f32(at, Run { values, slots, gradient: &gradient });
    }
    assert_eq!(committed(&fixture), before, "no block has moved");
    for ((stream, expected), first) in fixture.store.contents().iter().zip(&expected).zip(first) {
        let mut elements: Vec<f32> = bytemuck::cast_slice(stream).to_vec();
        for (&row, expected) in rows.iter().zip(expected.chunks(5)) {
            let found = &mut elements[5 * row as usize..][..5];
            assert_eq!(found, expected, "{rule:?}, row {row}");
            found.fill(first);
        }
        assert!(elements.iter().all(|&element| element == first), "{rule:?}: no other row changes");
    }
}

proptest! {
    /// The need computed before a change bounds what it records, wherever blocks end.
    #[test]
    fn recorded_undo_stays_within_the_computed_need(
        block_bits in 6..11_u32,
        width in 1..90_u64,
        rows in proptest::collection::btree_set(0..40_u32, 0..20),
        range in (0..40_u64, 0..40_u64),
        rule in 0..5_usize,
    ) {
        let rule = rules_by_slots()[rule].clone();
        let dense = VariableSpec::f32("d", [80]).unwrap();
        let table = VariableSpec::f32("t", [40, width]).unwrap().sparse();
        let rules = OptimizerRules::new(rule.clone());
        let block_bytes = 1 << block_bits;
        let (mut store, _) = holding(vec![dense, table], rules, block_bytes, 0, false).unwrap();
        let partition = store.layout().partitions()[1].clone();
        let rows: Vec<u32> = rows.into_iter().collect();
        let range = 8 * range.0.min(range.1)..8 * range.0.max(range.1);
        let mut logical_blocks = Vec::new();
        let touched = std::iter::once((&partition, &rows[..]));
        let need = store.undo_need(std::slice::from_ref(&range), touched, &mut logical_blocks);
        // Begins a change in place without the size check, which some of these changes would not
        // pass.
        store.undo.begin(1);
        for (logical, within) in store.pieces_of(&range) {
            store.record_undo(logical, within, rule.slots().len());
        }
        store.in_place = true;
        let input = vec![0; rows.len() * partition.row_bytes() as usize];
        let change = gradient_of(&*rule, ApplyAt::new(1, 0));
        store.change_rows(change, &partition, &rows, &input).unwrap();
        prop_assert!(store.undo.used_bytes() <= need, "{} of {need}", store.undo.used_bytes());
        let mut recorded: Vec<usize> = store.undo.rows(0).unwrap().iter()
            .filter(|row| row.stream == 0)
            .map(|row| (0..store.values.logical_blocks()).find(|&p| store.values.committed_block(p) == row.block).unwrap())
            .collect();
        for logical_blocks in [&mut recorded, &mut logical_blocks] {
            logical_blocks.sort_unstable();
            logical_blocks.dedup();
        }
        prop_assert_eq!(recorded, logical_blocks);
    }
}

/// Existing rows are changed in place, unless a checkpoint reads them or the undo cannot hold them.
#[test]
fn table_rows_are_changed_in_place_unless_they_are_read() {
    let spec = TableSpec::new(1 << 24).rows_at_once(100_000);
    let table = VariableSpec::table("t", DType::F32, [4], spec).unwrap();
    let rule = Adagrad::new(0.5);
    let rules = OptimizerRules::new(Arc::new(rule.clone()));
    let (mut store, mut journal) = holding(vec![table], rules, BLOCK, 0, true).unwrap();
    let mut version = 0;
    let mut is_in_place = |store: &mut Store, rows: u64| {
        version += 1;
        let ids: Vec<u64> = (0..rows).collect();
        store.tables_mut()[0].begin(&mut journal, &ids, version, version, false).unwrap();
        store.reserve_intent_for_tables(&mut journal).unwrap();
        store.settle_tables(version);
        let in_place = store.is_in_place();
        let input = vec![1.0_f32; 4 * ids.len()];
        let at = ApplyAt::new(version, version);
        let change = gradient_of(&rule, at);
        store.change_table(0, change, 0..ids.len(), bytemuck::cast_slice(&input));
        store.publish(&mut journal);
        store.tables().iter().for_each(|table| table.stage_head(&mut journal));
        journal.commit();
        store.committed(ValueCounts::default());
        assert!(!store.is_in_place(), "the change is complete");
        store.tables()[0].check_invariants(&journal);
        in_place
    };
    assert!(is_in_place(&mut store, 1000));
    let image = store.image(1, Arc::default());
    assert!(!is_in_place(&mut store, 1000), "an image pins the rows");
    drop(image);
    assert!(is_in_place(&mut store, 1000));
    assert!(!is_in_place(&mut store, 100_000), "the undo holds at most 8 MiB");
}

/// The rows are inserted first, and then changed in place, with every number of slots.
#[test]
fn table_rows_have_the_slots_of_their_rule() {
    for rule in rules_by_slots() {
        let table = VariableSpec::table("t", DType::F32, [3], TableSpec::new(1 << 20)).unwrap();
        let (mut store, mut journal) =
            holding(vec![table], OptimizerRules::new(rule.clone()), BLOCK, 0, true).unwrap();
        let ids: Vec<u64> = (0..100).map(|i| i * i).collect();
        let gradient: Vec<f32> = (0..3 * ids.len()).map(|i| (i as f32).sin()).collect();
        let first = rule.slots().iter().map(|slot| slot.initial as f32);
        let mut expected: Vec<Vec<f32>> =
            std::iter::once(0.0).chain(first).map(|first| vec![first; gradient.len()]).collect();
        for version in 1..=2 {
            store.tables_mut()[0].begin(&mut journal, &ids, version, version, false).unwrap();
            store.reserve_intent_for_tables(&mut journal).unwrap();
            store.settle_tables(version);
            let at = ApplyAt::new(version, version);
            let input = bytemuck::cast_slice(&gradient);
            store.change_table(0, gradient_of(&*rule, at), 0..ids.len(), input);
            store.publish(&mut journal);
            store.tables().iter().for_each(|table| table.stage_head(&mut journal));
            journal.commit();
            store.committed(ValueCounts::default());
            let mut streams = expected.iter_mut().map(Vec::as_mut_slice);
            let values = streams.next().unwrap();
            let slots = &mut streams.collect::<Vec<_>>()[..];
            rule.apply_f32(at, Run { values, slots, gradient: &gradient });
        }
        let table = &store.tables()[0];
        let mut numbers = Vec::new();
        encode_numbers(table.partition(), ids.iter().copied(), &mut numbers);
        let numbers = Numbers::of(table.partition(), &numbers);
        let mut rows = Vec::new();
        table.gather(&journal, numbers, &mut Vec::new(), &mut rows);
        assert!(rows == bytemuck::cast_slice::<f32, u8>(&expected[0]), "{rule:?}");
    }
}

/// A block size in a file is accepted only if it is a power of two in range.
#[test]
fn invalid_block_sizes_are_rejected() {
    let store = fixture(Sgd::new(1.0), 1).store;
    let of = |bytes| StoreGeometry::of_words(store.layout(), 0, bytes, 1).map(|it| it.block_bytes);
    for (bytes, expected) in [
        (0, None),
        (4, None),
        (8, Some(8)),
        (24, None),
        (BLOCK_BYTES, Some(BLOCK_BYTES)),
        (BLOCK_BYTES + 8, None),
        (1 << 30, Some(1 << 30)),
        (1 << 31, None),
    ] {
        assert_eq!(of(bytes), expected, "{bytes} bytes");
    }
}

/// Very many blocks become fewer and longer.
#[test]
fn large_layouts_have_longer_blocks() {
    let of = |elements| {
        let (store, _) = alone(elements, Arc::new(Sgd::new(1.0)), BLOCK, 0, false).unwrap();
        (store.geometry().block_bytes, store.geometry().logical_blocks)
    };
    let each = BLOCK as u64 / 4;
    assert_eq!(of(1023 * each), (BLOCK, 1023));
    assert_eq!(of(1024 * each), (4 * BLOCK, 256));
    assert_eq!(of(1024 * each + 1), (4 * BLOCK, 257));
}

/// Gradients in shared memory.
#[cfg(target_os = "linux")]
mod shared {
    use std::fs::File;
    use std::os::unix::fs::FileExt;

    use pushpull_common::finite::Exponents;

    use super::*;
    use crate::arena::SharedBytes;
    use pushpull_optim::optimizer::{Adadelta, AdamW, Ftrl, Momentum};
    use pushpull_optim::volatile::Volatile;

    const BYTES: usize = 4 * ELEMENTS as usize;

    /// A byte source that offers only shared memory.
    struct SharedSource<'a> {
        gradients: Vec<Volatile<'a>>,
        at: usize,
    }

    impl ByteSource for SharedSource<'_> {
        fn fill(&mut self, to: &mut [u8]) {
            panic!("{} bytes at {} were not read in place", to.len(), self.at);
        }

        fn shared_input(&self) -> Option<SharedRun<'_>> {
            let divisor = self.gradients.len() as u32;
            let exponents = Exponents::of(DType::F32);
            Some(SharedRun { gradients: &self.gradients, at: self.at, divisor, exponents })
        }

        fn consume_shared(&mut self, bytes: usize, full: bool) {
            assert!(!full, "there is no NaN");
            self.at += bytes;
        }
    }

    fn gradient(of: usize) -> Vec<f32> {
        (0..ELEMENTS as usize).map(|at| ((at * 7 + of) % 13) as f32 - 6.0).collect()
    }

    fn share(gradient: &[f32]) -> SharedBytes {
        let (shared, descriptor) = SharedBytes::new(BYTES).unwrap();
        File::from(descriptor).write_all_at(bytemuck::cast_slice(gradient), 0).unwrap();
        shared
    }

    /// Each rule reads the gradients in its own loop, as one gradient and as the mean of several.
    #[test]
    fn every_rule_reads_shared_gradients_in_place() {
        let rules: [Arc<dyn Optimizer>; 11] = [
            Arc::new(Sgd::new(0.5)),
            Arc::new(Momentum::new(0.5, 0.9)),
            Arc::new(Momentum::nesterov(0.5, 0.9)),
            Arc::new(Adagrad::new(0.5)),
            Arc::new(Adadelta::new(0.5)),
            Arc::new(RmsProp::new(0.5)),
            Arc::new(RmsProp::new(0.5).centered()),
            Arc::new(Adam::new(0.5)),
            Arc::new(AdamW::new(0.5)),
            Arc::new(Lamb::new(0.5)),
            Arc::new(Ftrl::new(0.5)),
        ];
        let at = ApplyAt::new(1, 0);
        for (rule, count) in rules.iter().flat_map(|rule| (1..=4).map(move |n| (rule, n))) {
            let files: Vec<SharedBytes> = (0..count).map(|of| share(&gradient(of))).collect();
            let sum = (1..count).fold(gradient(0), |sum, of| {
                sum.iter().zip(gradient(of)).map(|(sum, more)| sum + more).collect()
            });
            let mean: Vec<f32> = sum.iter().map(|sum| sum / count as f32).collect();
            let changed = |mut input: ChangeInput<'_>| {
                let mut fixture = fixture(rule.clone(), 1);
                fixture
                    .change(&[0..BYTES as u64], |store, range| {
                        let input = match &mut input {
                            ChangeInput::Bytes(bytes) => ChangeInput::Bytes(bytes),
                            ChangeInput::Source(source) => ChangeInput::Source(&mut **source),
                        };
                        store.change(gradient_of(&**rule, at), range, input)
                    })
                    .unwrap();
                fixture.store.contents()
            };
            let gradients = files.iter().map(|file| file.bytes(0, BYTES)).collect();
            let mut source = SharedSource { gradients, at: 0 };
            let shared = changed(ChangeInput::Source(&mut source));
            assert_eq!(source.at, BYTES, "{rule:?} of {count}");
            assert!(shared == changed(bytemuck::cast_slice(&mean).into()), "{rule:?} of {count}");
            assert!(shared[0].iter().any(|&byte| byte != 0), "{rule:?} has an effect");
        }
    }
}
