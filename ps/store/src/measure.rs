//! A store without a shard or connections, for benchmarks of the change and its commit.
//!
//! Hidden from the documentation: the API may change with every version.

use std::ops::Range;
use std::sync::Arc;

use pushpull_common::catalogue::Catalogue;
use pushpull_common::ids::ShardId;
use pushpull_common::placement::{Placement, PlacementStrategy, ShardMap};
use pushpull_common::rows::{Numbers, encode_numbers};
use pushpull_common::shared_values::ValueCounts;
use pushpull_common::table::TableSpec;
use pushpull_common::tensor::DType;
use pushpull_common::variable::VariableSpec;
use pushpull_optim::optimizer::{ApplyAt, Optimizer, OptimizerRules, Run, SumRun, Sums};

use crate::arena::{Arena, ArenaStorage, Budget, Memory, SKEW_BYTES};
use crate::cache::prefetch;
use crate::change::{Change, SLOTS_MAX};
use crate::commit::{Journal, table_bytes};
use crate::error::StorageError;
use crate::layout::{Kind, PAGE_BYTES, Stamp};
use crate::planted::PlantedBugs;
use crate::store::{BLOCK_BYTES, CACHED_BYTES_MAX, Store, StoreGeometry, StorePlan};
use crate::table::Table;

/// The size of a part of a push in bytes.
const PART_BYTES: usize = 1 << 20;

/// A store of one f32 variable, in anonymous memory.
#[derive(Debug)]
pub struct StoreUnderTest {
    store: Store,
    journal: Journal,
    optimizer: Arc<dyn Optimizer>,
    version: u64,
}

impl StoreUnderTest {
    /// Creates a variable of `elements` zeros.
    ///
    /// # Errors
    /// If the memory cannot be allocated.
    ///
    /// # Panics
    /// If `elements` is 0.
    pub fn new(elements: u64, optimizer: Arc<dyn Optimizer>) -> Result<Self, StorageError> {
        let (store, journal) = alone(elements, optimizer.clone(), BLOCK_BYTES, 0, false)?;
        Ok(StoreUnderTest { store, journal, optimizer, version: 0 })
    }

    /// Creates a sparse variable of `rows` rows of zeros.
    ///
    /// # Errors
    /// If the memory cannot be allocated.
    ///
    /// # Panics
    /// If the shape is invalid for a sparse variable.
    pub fn table(
        rows: u64,
        width: u64,
        optimizer: Arc<dyn Optimizer>,
    ) -> Result<Self, StorageError> {
        let variable = VariableSpec::f32("w", [rows, width]).expect("a variable with elements");
        let rules = OptimizerRules::new(optimizer.clone());
        let (store, journal) = holding(vec![variable.sparse()], rules, BLOCK_BYTES, 0, false)?;
        Ok(StoreUnderTest { store, journal, optimizer, version: 0 })
    }

    /// Applies a gradient of rows, with ascending row numbers, and commits it.
    ///
    /// # Panics
    /// If a row number is out of range.
    pub fn push_rows(&mut self, rows: &[u32], gradient: &[f32]) {
        let partition = self.store.layout().partitions()[0].clone();
        let touched = std::iter::once((&partition, rows));
        let begun = self.store.begin(&[], touched, self.version + 1);
        begun.expect("no block is pinned");
        let at = ApplyAt::new(self.version + 1, self.version);
        let change = Change::Gradient { optimizer: &*self.optimizer, at, dtype: DType::F32 };
        let changed =
            self.store.change_rows(change, &partition, rows, bytemuck::cast_slice(gradient));
        changed.expect("no block is pinned");
        self.commit();
    }

    /// Returns rows, concatenated.
    ///
    /// # Panics
    /// If a row number is out of range.
    pub fn pull_rows(&self, rows: &[u32]) -> Vec<u8> {
        let partition = &self.store.layout().partitions()[0];
        let mut gathered = Vec::new();
        self.store.gather(partition, rows.iter().copied(), &mut gathered);
        gathered
    }

    /// Creates an empty growing table, whose rows start as zeros.
    ///
    /// # Errors
    /// If the memory cannot be allocated.
    ///
    /// # Panics
    /// If the shape is invalid for a table.
    pub fn growing(
        width: u64,
        table: TableSpec,
        optimizer: Arc<dyn Optimizer>,
    ) -> Result<Self, StorageError> {
        let variable = VariableSpec::table("t", DType::F32, [width], table).expect("a table");
        let rules = OptimizerRules::new(optimizer.clone());
        let (store, journal) = holding(vec![variable], rules, BLOCK_BYTES, 0, false)?;
        Ok(StoreUnderTest { store, journal, optimizer, version: 0 })
    }

    /// Applies a gradient of rows of a growing table, with ascending ids, and commits it.
    ///
    /// # Panics
    /// If the memory cannot be allocated.
    pub fn push_ids(&mut self, ids: &[u64], gradient: &[f32]) {
        let table = &mut self.store.tables_mut()[0];
        let version = self.version + 1;
        let begun = table.begin(&mut self.journal, ids, self.version, version, false);
        begun.expect("memory for the rows");
        self.journal.grow_intent(table.dirty_words()).expect("memory for an intent");
        let at = ApplyAt::new(version, self.version);
        let change = Change::Gradient { optimizer: &*self.optimizer, at, dtype: DType::F32 };
        self.store.settle_tables(version);
        self.store.change_table(0, change, 0..ids.len(), bytemuck::cast_slice(gradient));
        self.commit();
    }

    /// Returns rows of a growing table, concatenated.
    pub fn pull_ids(&self, ids: &[u64]) -> Vec<u8> {
        let table = &self.store.tables()[0];
        let mut encoded = Vec::new();
        encode_numbers(table.partition(), ids.iter().copied(), &mut encoded);
        let numbers = Numbers::of(table.partition(), &encoded);
        let mut gathered = Vec::new();
        table.gather(&self.journal, numbers, &mut Vec::new(), &mut gathered);
        gathered
    }

    fn commit(&mut self) {
        self.store.publish(&mut self.journal);
        self.store.tables().iter().for_each(|table| table.stage_head(&mut self.journal));
        self.version += 1;
        self.journal.commit();
        self.store.committed(ValueCounts::default());
    }

    /// Applies a gradient part by part, as a shard applies a push, and commits it.
    ///
    /// # Panics
    /// If the gradient has a different length than the variable.
    pub fn push(&mut self, gradient: &[f32]) {
        let bytes: &[u8] = bytemuck::cast_slice(gradient);
        let whole: Range<u64> = 0..bytes.len() as u64;
        let no_rows = std::iter::empty();
        let begun = self.store.begin(std::slice::from_ref(&whole), no_rows, self.version + 1);
        begun.expect("no block is pinned");
        let mut at = ApplyAt::new(self.version + 1, self.version);
        if self.optimizer.sums_whole_variables() {
            let optimizer = &*self.optimizer;
            let dtype = DType::F32;
            let change = Change::Gradient { optimizer, at, dtype };
            let mut sums = Sums::default();
            self.store.add_up(change, whole, bytes.into(), &mut sums);
            at = at.with_sums(sums.totals());
        }
        let mut start = 0;
        for part in bytes.chunks(PART_BYTES) {
            let range = start..start + part.len() as u64;
            let optimizer = &*self.optimizer;
            let dtype = DType::F32;
            let change = Change::Gradient { optimizer, at, dtype };
            let changed = self.store.change(change, range.clone(), part.into());
            changed.expect("no block is pinned");
            start = range.end;
        }
        self.commit();
    }

    /// Returns the values.
    pub fn values(&self) -> Vec<f32> {
        let range = 0..self.store.layout().bytes();
        let snapshot = self.store.snapshot(std::slice::from_ref(&range));
        let pieces = snapshot.pieces(range);
        pieces.flat_map(|piece| bytemuck::cast_slice(piece).iter().copied()).collect()
    }
}

/// Creates a store of one f32 variable and its journal, as a shard has them. `pin_bytes` bytes of
/// values may be pinned; `integrity` adds checksums of blocks.
///
/// # Panics
/// If `elements` is 0.
pub(crate) fn alone(
    elements: u64,
    optimizer: Arc<dyn Optimizer>,
    block_bytes: usize,
    pin_bytes: u64,
    integrity: bool,
) -> Result<(Store, Journal), StorageError> {
    let variable = VariableSpec::f32("w", [elements]).expect("a variable with elements");
    holding(vec![variable], OptimizerRules::new(optimizer), block_bytes, pin_bytes, integrity)
}

/// Creates a store of several variables and its journal, as a shard has them.
pub(crate) fn holding(
    variables: Vec<VariableSpec>,
    rules: OptimizerRules,
    block_bytes: usize,
    pin_bytes: u64,
    integrity: bool,
) -> Result<(Store, Journal), StorageError> {
    let map = ShardMap::new([0], 1).expect("one shard");
    let placement = Placement::plan(&variables, &map, &PlacementStrategy::RoundRobin);
    let placement = placement.expect("variables on one shard");
    let catalogue = Catalogue::new(variables, &placement).expect("variables");
    let layout = catalogue.layout(ShardId::default());
    let rules = rules.of_variables(&catalogue);
    let slots = rules.most_slots(&layout);
    let geometry = StoreGeometry::new(&layout, slots, block_bytes, Some(pin_bytes));
    let stamp = Stamp { shard: ShardId::default(), arena: 1 };
    let arena = Arena { storage: ArenaStorage::Anonymous, stamp };
    let control = arena.create(Kind::Control, 0, PAGE_BYTES as u64)?;
    let planted = PlantedBugs::default();
    let words = geometry.table_words();
    let tables = layout.tables().len();
    let mut journal = Journal::create(&arena, control, words + 8 * tables, planted)?;
    let memory = arena.create(Kind::Tables, 1, table_bytes(words + tables))?;
    journal.begin_tables(memory, 1, geometry.first_table());
    let plan = StorePlan {
        arena: arena.clone(),
        generation: 1,
        catalogue: Arc::new(catalogue),
        layout,
        geometry,
        integrity,
        pin_budget: None,
        power: false,
        cached_bytes_max: CACHED_BYTES_MAX,
        planted,
    };
    let reservation = Budget::new(geometry.need(true)).reserve(geometry.need(true))?;
    let mut store = Store::create(plan, reservation, &rules)?;
    store.attach_tables(&arena, 1, &Budget::new(u64::MAX), &rules, 1, |inputs| {
        Table::create(inputs, &mut journal)
    })?;
    Ok((store, journal))
}

/// An optimizer over plain buffers, in place and without a commit: the upper bound of the machine.
#[derive(Debug)]
pub struct InPlace {
    /// Values, then slots, each skewed against the others, in the same kind of memory as the store.
    streams: Vec<Memory>,
    optimizer: Arc<dyn Optimizer>,
    count: u64,
}

impl InPlace {
    /// Creates buffers of `elements` elements: values of zero, and slots with their initial values.
    ///
    /// # Errors
    /// If the memory cannot be allocated.
    pub fn new(elements: usize, optimizer: Arc<dyn Optimizer>) -> std::io::Result<Self> {
        let initial = optimizer.slots().iter().map(|slot| slot.initial as f32);
        let streams = std::iter::once(0.0).chain(initial).enumerate();
        let streams = streams.map(|(i, initial)| {
            let mut stream = Memory::anonymous(4 * elements + i * SKEW_BYTES)?;
            bytemuck::cast_slice_mut(stream.bytes_mut()).fill(initial);
            Ok(stream)
        });
        let streams = streams.collect::<std::io::Result<_>>()?;
        Ok(InPlace { streams, optimizer, count: 0 })
    }

    /// Applies a gradient.
    pub fn push(&mut self, gradient: &[f32]) {
        self.count += 1;
        let mut at = ApplyAt::new(self.count, self.count - 1);
        if self.optimizer.sums_whole_variables() {
            let streams = self.streams.iter().enumerate().map(|(stream, buffer)| {
                let start = stream * SKEW_BYTES / 4;
                &bytemuck::cast_slice(buffer.bytes())[start..start + gradient.len()]
            });
            let streams = streams.collect::<Vec<&[f32]>>();
            let mut sums = Sums::default();
            let run = SumRun::new(streams[0], &streams[1..], gradient);
            self.optimizer.sum_f32(at, run, &mut sums);
            at = at.with_sums(sums.totals());
        }
        let mut streams = self.streams.iter_mut().enumerate().map(|(stream, buffer)| {
            let start = stream * SKEW_BYTES / 4;
            &mut bytemuck::cast_slice_mut(buffer.bytes_mut())[start..start + gradient.len()]
        });
        let values = streams.next().expect("a stream of values");
        let mut slots: Vec<&mut [f32]> = streams.collect();
        self.optimizer.apply_f32(at, Run { values, slots: &mut slots, gradient });
    }

    /// Returns the values.
    pub fn values(&self) -> &[f32] {
        bytemuck::cast_slice(self.streams[0].bytes())
    }
}

/// The prefetch distance of a rule in place, in rows.
const PREFETCH_ROWS: usize = 64;

/// Rows over plain buffers, gathered and changed in place without a commit.
#[derive(Debug)]
pub struct RowsInPlace {
    buffers: InPlace,
    width: usize,
}

impl RowsInPlace {
    /// Creates `rows` rows of zeros, and slots with their initial values.
    ///
    /// # Errors
    /// If the memory cannot be allocated.
    pub fn new(rows: usize, width: usize, optimizer: Arc<dyn Optimizer>) -> std::io::Result<Self> {
        Ok(RowsInPlace { buffers: InPlace::new(rows * width, optimizer)?, width })
    }

    /// Copies rows to `out`, concatenated.
    pub fn gather(&self, rows: &[u32], out: &mut [f32]) {
        let values = self.values();
        for (&row, out) in rows.iter().zip(out.chunks_exact_mut(self.width)) {
            let start = row as usize * self.width;
            out.copy_from_slice(&values[start..start + self.width]);
        }
    }

    /// Applies a gradient of rows. Prefetches each row.
    pub fn push(&mut self, rows: &[u32], gradient: &[f32]) {
        let width = self.width;
        let InPlace { streams, optimizer, count } = &mut self.buffers;
        *count += 1;
        let at = ApplyAt::new(*count, *count - 1);
        let elements = |stream: usize, row: u32| {
            let start = stream * SKEW_BYTES / 4 + row as usize * width;
            start..start + width
        };
        let mut ahead = rows.iter().skip(PREFETCH_ROWS);
        for (&row, gradient) in rows.iter().zip(gradient.chunks_exact(width)) {
            if let Some(&next) = ahead.next() {
                for (stream, buffer) in streams.iter().enumerate() {
                    let buffer = bytemuck::cast_slice::<u8, f32>(buffer.bytes());
                    prefetch(&buffer[elements(stream, next)]);
                }
            }
            let mut streams = streams.iter_mut().enumerate().map(|(stream, buffer)| {
                &mut bytemuck::cast_slice_mut(buffer.bytes_mut())[elements(stream, row)]
            });
            let values = streams.next().expect("a stream of values");
            let mut slots: [&mut [f32]; SLOTS_MAX] = std::array::from_fn(|_| Default::default());
            let mut count = 0;
            for (slot, stream) in slots.iter_mut().zip(streams) {
                *slot = stream;
                count += 1;
            }
            optimizer.apply_f32(at, Run { values, slots: &mut slots[..count], gradient });
        }
    }

    /// Returns the values.
    pub fn values(&self) -> &[f32] {
        self.buffers.values()
    }
}
