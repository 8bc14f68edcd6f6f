//! Blocks, snapshots and slots, by themselves.

use pushpull_common::ids::ShardId;
use pushpull_common::placement::{Placement, ShardMap, Strategy};
use pushpull_common::variable::VariableSpec;

use super::*;
use crate::arena::Budget;
use crate::optimizer::{Adam, Sgd, SlotSpec};

const ELEMENTS: u64 = 3 * BLOCK_BYTES as u64 / 4;

/// Three blocks of f32, and so many spare ones.
fn store(optimizer: &dyn Optimizer, spare: u64) -> Store {
    let variables = vec![VariableSpec::f32("w", [ELEMENTS]).unwrap()];
    let map = ShardMap::new([0], 1).unwrap();
    let placement = Placement::plan(&variables, &map, &Strategy::RoundRobin).unwrap();
    let catalogue = Arc::new(Catalogue::new(variables, &placement).unwrap());
    let layout = catalogue.layout(ShardId::default());
    let pin = Some(spare * BLOCK_BYTES as u64);
    let need = Store::need(&layout, optimizer, pin);
    let slots = optimizer.slots().len() as u64 * layout.bytes();
    assert_eq!(need, (3 + spare) * BLOCK_BYTES as u64 + slots);
    let loan = Budget::new(need).take(need).unwrap();
    Store::create(&Arena::Anonymous, loan, catalogue, layout, optimizer, pin).unwrap()
}

fn read(snapshot: &Snapshot, range: Range<u64>) -> Vec<f32> {
    let mut slices = Vec::new();
    snapshot.slices(range, &mut slices);
    slices.iter().flat_map(|slice| bytemuck::cast_slice::<u8, f32>(slice).to_vec()).collect()
}

#[test]
fn a_change_to_pinned_blocks_is_made_whole_or_not_at_all() {
    let mut store = store(&Sgd::new(1.0), 2);
    let all = 0..4 * ELEMENTS;
    let ones = vec![1_f32; ELEMENTS as usize];
    let ones = bytemuck::cast_slice::<f32, u8>(&ones);
    let first = store.snapshot(&[0..8, all.end - 8..all.end]);
    store.add(DType::F32, all.clone(), ones).unwrap();
    store.check_invariants();
    // The middle block was not pinned: it changed in place.
    assert_eq!((store.spare.len(), store.retired.len()), (0, 2));
    assert_eq!(read(&first, 0..8), [0.0; 2]);
    let second = store.snapshot(std::slice::from_ref(&all));
    assert_eq!(store.add(DType::F32, all.clone(), ones), Err(NoSpareBlock));
    assert!(read(&second, all.clone()).iter().all(|&value| value == 1.0));
    drop(first);
    assert_eq!(store.add(DType::F32, all.clone(), ones), Err(NoSpareBlock), "three are needed");
    assert_eq!(read(&store.snapshot(std::slice::from_ref(&all)), 0..8), [1.0; 2]);
    drop(second);
    store.add(DType::F32, all.clone(), ones).unwrap();
    store.check_invariants();
    let values = read(&store.snapshot(std::slice::from_ref(&all)), all);
    assert!(values.iter().all(|&value| value == 2.0));
    // The blocks that were replaced while they were pinned are spare again.
    let third = store.snapshot(std::slice::from_ref(&(0..8)));
    store.add(DType::F32, 0..8, &ones[..8]).unwrap();
    assert_eq!(read(&third, 0..8), [2.0; 2]);
    store.check_invariants();
}

#[test]
fn a_snapshot_is_read_at_any_cut() {
    let mut store = store(&Sgd::new(1.0), 1);
    let counted: Vec<f32> = (0..ELEMENTS).map(|index| index as f32).collect();
    store.assign(0..4 * ELEMENTS, bytemuck::cast_slice(&counted)).unwrap();
    let block = BLOCK_BYTES as u64;
    let ranges = [8..16, block - 8..block + 8, 3 * block - 8..3 * block];
    let snapshot = store.snapshot(&ranges);
    for range in ranges {
        let expected = &counted[range.start as usize / 4..range.end as usize / 4];
        assert_eq!(read(&snapshot, range), expected);
    }
    assert_eq!(snapshot.logical, [0, 1, 2], "each block is pinned once");
    assert!(read(&snapshot, 8..8).is_empty());
}

#[test]
fn slots_start_as_the_rule_says_and_belong_to_their_elements() {
    let adam = Adam::new(0.1);
    let mut store = store(&adam, 1);
    let range = 8..4 * ELEMENTS - 8;
    let gradient = vec![1_f32; (range.end - range.start) as usize / 4];
    let bytes = bytemuck::cast_slice(&gradient);
    store.apply(&adam, ApplyAt::new(1, 0), DType::F32, range, bytes).unwrap();
    let m: &[f32] = bytemuck::cast_slice(store.slots[0].bytes());
    assert_eq!((m[1], m[2], m[ELEMENTS as usize - 3], m[ELEMENTS as usize - 1]), {
        let first = (1.0 - 0.9_f64) as f32;
        (0.0, first, first, 0.0)
    });
}

/// A rule whose slot starts at something else than zero.
#[derive(Debug)]
struct Started;

impl Optimizer for Started {
    fn kind(&self) -> &'static str {
        "started"
    }

    fn slots(&self) -> &[SlotSpec] {
        const { &[SlotSpec::new("s", 0.5)] }
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
    let mut store = store(&Started, 1);
    let range = 0..4 * ELEMENTS;
    let gradient = vec![0; range.end as usize];
    store.apply(&Started, ApplyAt::new(1, 0), DType::F32, range.clone(), &gradient).unwrap();
    let values = read(&store.snapshot(std::slice::from_ref(&range)), range);
    assert!(values.iter().all(|&value| value == 0.5));
}
