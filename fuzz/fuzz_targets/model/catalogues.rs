//! The catalogues that the fuzzed chief declares, and values that are equal within a partition.

use std::sync::OnceLock;

use pushpull_common::catalogue::{Catalogue, ShardLayout};
use pushpull_common::ids::ShardId;
use pushpull_common::initializer::Initializer;
use pushpull_common::placement::{Placement, PlacementStrategy, ShardMap};
use pushpull_common::tensor::{DType, Shape};
use pushpull_common::variable::VariableSpec;

/// An encoded catalogue with its digest and the layout of shard 0.
pub(crate) struct Declarable {
    pub(crate) digest: [u8; 32],
    pub(crate) encoded: Vec<u8>,
    pub(crate) layout: ShardLayout,
}

/// Returns the catalogues, made once for all inputs.
pub(crate) fn declarables() -> &'static [Declarable] {
    static MADE: OnceLock<Vec<Declarable>> = OnceLock::new();
    MADE.get_or_init(make)
}

/// Makes five catalogues: a small one, one of several blocks, an empty one, one that does not fit
/// into memory, and one that also has shards on a task outside the cluster.
fn make() -> Vec<Declarable> {
    let f32 = |name, extent| VariableSpec::f32(name, [extent]).expect("a small variable");
    let scalar = |name, dtype| {
        VariableSpec::new(name, dtype, Shape::scalar()).expect("a scalar is a variable")
    };
    let ones = |variable: VariableSpec| variable.initializer(Initializer::Ones);
    let small = vec![
        ones(f32("w", 5)),
        f32("b", 3),
        scalar("count", DType::I64),
        f32("none", 0),
        scalar("mean", DType::F64).plain(),
    ];
    let wide = vec![
        f32("w", 17_000),
        scalar("rate", DType::F64),
        ones(f32("b", 7)),
        f32("average", 900).plain(),
    ];
    vec![
        declarable(small.clone(), &[0]),
        declarable(wide, &[0]),
        declarable(Vec::new(), &[0]),
        declarable(vec![f32("huge", 1 << 20)], &[0]),
        declarable(small, &[0, 1]),
    ]
}

fn declarable(variables: Vec<VariableSpec>, tasks: &[u32]) -> Declarable {
    let map = ShardMap::new(tasks.to_vec(), 1).expect("there are shards");
    let placement = Placement::plan(&variables, &map, &PlacementStrategy::RoundRobin);
    let placement = placement.expect("the variables can be placed");
    let catalogue = Catalogue::new(variables, &placement).expect("the variables are valid");
    Declarable {
        digest: catalogue.digest(),
        encoded: catalogue.encode().to_vec(),
        layout: catalogue.layout(ShardId::default()),
    }
}

/// Returns the bytes of a whole layout with all elements equal to `value`; 255 means NaN.
pub(crate) fn image(layout: &ShardLayout, value: u8) -> Vec<u8> {
    let mut bytes = vec![0; layout.bytes() as usize];
    let number = if value == u8::MAX { f64::NAN } else { f64::from(value) };
    for partition in layout.partitions() {
        let start = partition.offset as usize;
        let element = match partition.dtype {
            DType::F32 => (number as f32).to_le_bytes().to_vec(),
            DType::F64 => number.to_le_bytes().to_vec(),
            _ => i64::from(value).to_le_bytes().to_vec(),
        };
        for chunk in bytes[start..start + partition.bytes as usize].chunks_mut(element.len()) {
            chunk.copy_from_slice(&element);
        }
    }
    bytes
}

/// Finds an element that differs from the first one: its index and its bits. All NaN are equal.
pub(crate) fn differing(dtype: DType, bytes: &[u8]) -> Option<(usize, u64)> {
    let bits = |chunk: &[u8]| match dtype {
        DType::F32 => {
            let bits = u32::from_le_bytes(chunk.try_into().expect("chunks of 4"));
            if f32::from_bits(bits).is_nan() { u64::MAX } else { bits.into() }
        }
        DType::F64 => {
            let bits = u64::from_le_bytes(chunk.try_into().expect("chunks of 8"));
            if f64::from_bits(bits).is_nan() { u64::MAX } else { bits }
        }
        _ => u64::from_le_bytes(chunk.try_into().expect("chunks of 8")),
    };
    let mut elements = bytes.chunks(dtype.size()).map(bits).enumerate();
    let (_, first) = elements.next()?;
    elements.find(|&(_, bits)| bits != first)
}
