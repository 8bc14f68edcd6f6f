//! The canonical byte encoding of a catalogue.

use super::{CatalogueError, PartitionPlacement};
use crate::ids::{ShardId, VariableId};
use crate::initializer::Initializer;
use crate::protocol::ProtocolError;
use crate::protocol::limits::NAME_BYTES_MAX;
use crate::protocol::wire::{FieldReader, Text, Wire};
use crate::table::{BUCKETS, Eviction, RowAdmission, TableSpec};
use crate::tensor::{DType, Shape, ShapeError};
use crate::variable::{Replication, VariableSpec};

pub(super) fn encode(variables: &[VariableSpec], places: &[PartitionPlacement]) -> Vec<u8> {
    let mut out = Vec::new();
    FORMAT.put(&mut out);
    (variables.len() as u32).put(&mut out);
    for variable in variables {
        // Never clips: the name limit of a variable is the same as on the wire (asserted below).
        Text::<NAME_BYTES_MAX>::clipped(variable.name()).put(&mut out);
        variable.dtype().code().put(&mut out);
        out.push(variable.shape().rank() as u8);
        for extent in variable.shape().extents() {
            extent.put(&mut out);
        }
        put_update(variable, &mut out);
        put_rows(variable, &mut out);
        put_initializer(variable.initializer, &mut out);
        variable.seed.put(&mut out);
    }
    (places.len() as u32).put(&mut out);
    for place in places {
        place.variable.put(&mut out);
        place.rows.start.put(&mut out);
        place.rows.end.put(&mut out);
        place.shard.put(&mut out);
    }
    out
}

fn take_variable(reader: &mut FieldReader<'_>) -> Result<VariableSpec, CatalogueError> {
    let name = Text::<NAME_BYTES_MAX>::take(reader)?;
    let code = u8::take(reader)?;
    let dtype = DType::from_code(code).ok_or_else(|| reader.invalid("dtype", code.into()))?;
    let rank = usize::from(u8::take(reader)?);
    if rank > Shape::RANK_MAX {
        return Err(ShapeError::Rank { rank }.into());
    }
    let extents: Vec<u64> =
        (0..rank).map(|_| u64::take(reader)).collect::<Result<_, ProtocolError>>()?;
    let update = take_update(reader)?;
    if update == ChangeKind::Trained && !dtype.is_float() {
        return Err(reader.invalid("update", 1).into());
    }
    let rows = take_rows(reader)?;
    let initializer = take_initializer(reader)?;
    let seed = u64::take(reader)?;
    let mut variable = match rows {
        RowKind::Table(table) => {
            let Some((&BUCKETS, row)) = extents.split_first() else {
                let rows = extents.first().copied().unwrap_or(0);
                return Err(reader.invalid("buckets", rows).into());
            };
            VariableSpec::table(name.as_str(), dtype, row, table)?
        }
        RowKind::Sparse => VariableSpec::new(name.as_str(), dtype, Shape::new(extents)?)?.sparse(),
        RowKind::Dense => VariableSpec::new(name.as_str(), dtype, Shape::new(extents)?)?,
    };
    variable = variable.initializer(initializer).seed(seed);
    variable = match update {
        ChangeKind::Trained => variable,
        ChangeKind::Plain(Replication::Shared) => variable.plain(),
        ChangeKind::Plain(Replication::Local) => variable.local(),
        ChangeKind::Plain(Replication::Mean { every }) => variable.mean_every_steps(every),
    };
    variable.validate()?;
    Ok(variable)
}

/// What changes a variable's values on the servers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ChangeKind {
    Plain(Replication),
    Trained,
}

fn put_update(variable: &VariableSpec, out: &mut Vec<u8>) {
    match variable.replication() {
        Replication::Shared => u8::from(variable.is_trainable()).put(out),
        Replication::Local => 2_u8.put(out),
        Replication::Mean { every } => {
            3_u8.put(out);
            every.put(out);
        }
    }
}

fn take_update(reader: &mut FieldReader<'_>) -> Result<ChangeKind, ProtocolError> {
    Ok(match u8::take(reader)? {
        0 => ChangeKind::Plain(Replication::Shared),
        1 => ChangeKind::Trained,
        2 => ChangeKind::Plain(Replication::Local),
        3 => ChangeKind::Plain(Replication::Mean { every: u64::take(reader)? }),
        other => return Err(reader.invalid("update", other.into())),
    })
}

/// The kind of rows that a variable has.
enum RowKind {
    Dense,
    Sparse,
    Table(TableSpec),
}

fn put_rows(variable: &VariableSpec, out: &mut Vec<u8>) {
    let Some(table) = variable.as_table() else {
        return u8::from(variable.is_sparse()).put(out);
    };
    2_u8.put(out);
    table.bytes_max.put(out);
    table.rows_at_once.put(out);
    let (tag, pushes, probability): (u8, u32, f64) = match table.admission {
        RowAdmission::Always => (0, 0, 0.0),
        RowAdmission::After { pushes } => (1, pushes, 0.0),
        RowAdmission::Chance { probability } => (2, 0, probability),
    };
    tag.put(out);
    pushes.put(out);
    probability.put(out);
    let eviction: u8 = match table.eviction {
        Eviction::Refuse => 0,
        Eviction::LeastRecent => 1,
        Eviction::LeastFrequent => 2,
    };
    eviction.put(out);
    // 0 stands for `None`: no table's rows expire after 0 steps.
    table.expire_after_steps.unwrap_or(0).put(out);
}

fn take_rows(reader: &mut FieldReader<'_>) -> Result<RowKind, ProtocolError> {
    match u8::take(reader)? {
        0 => return Ok(RowKind::Dense),
        1 => return Ok(RowKind::Sparse),
        2 => {}
        other => return Err(reader.invalid("rows", other.into())),
    }
    let bytes_max = u64::take(reader)?;
    let rows_at_once = u32::take(reader)?;
    let tag = u8::take(reader)?;
    let pushes = u32::take(reader)?;
    let probability = f64::take(reader)?;
    let admission = match tag {
        0 => RowAdmission::Always,
        1 => RowAdmission::After { pushes },
        2 => RowAdmission::Chance { probability },
        other => return Err(reader.invalid("admission", other.into())),
    };
    let eviction = match u8::take(reader)? {
        0 => Eviction::Refuse,
        1 => Eviction::LeastRecent,
        2 => Eviction::LeastFrequent,
        other => return Err(reader.invalid("eviction", other.into())),
    };
    let expire_after_steps = Some(u64::take(reader)?).filter(|&steps| steps > 0);
    let table = TableSpec { rows_at_once, admission, eviction, ..TableSpec::new(bytes_max) };
    Ok(RowKind::Table(TableSpec { expire_after_steps, ..table }))
}

fn put_initializer(initializer: Initializer, out: &mut Vec<u8>) {
    let (tag, a, b): (u8, f64, f64) = match initializer {
        Initializer::Zeros => (1, 0.0, 0.0),
        Initializer::Ones => (2, 0.0, 0.0),
        Initializer::Constant(value) => (3, value, 0.0),
        Initializer::Uniform { low, high } => (4, low, high),
        Initializer::Normal { mean, stddev } => (5, mean, stddev),
        Initializer::TruncatedNormal { mean, stddev } => (6, mean, stddev),
        Initializer::GlorotUniform => (7, 0.0, 0.0),
        Initializer::GlorotNormal => (8, 0.0, 0.0),
        Initializer::HeUniform => (9, 0.0, 0.0),
        Initializer::HeNormal => (10, 0.0, 0.0),
    };
    tag.put(out);
    a.put(out);
    b.put(out);
}

fn take_initializer(reader: &mut FieldReader<'_>) -> Result<Initializer, ProtocolError> {
    let tag = u8::take(reader)?;
    let a = f64::take(reader)?;
    let b = f64::take(reader)?;
    Ok(match tag {
        1 => Initializer::Zeros,
        2 => Initializer::Ones,
        3 => Initializer::Constant(a),
        4 => Initializer::Uniform { low: a, high: b },
        5 => Initializer::Normal { mean: a, stddev: b },
        6 => Initializer::TruncatedNormal { mean: a, stddev: b },
        7 => Initializer::GlorotUniform,
        8 => Initializer::GlorotNormal,
        9 => Initializer::HeUniform,
        10 => Initializer::HeNormal,
        other => return Err(reader.invalid("initializer", other.into())),
    })
}

/// Decodes variables and placements; the caller must check that they form a catalogue.
pub(super) fn decode(
    bytes: &[u8],
) -> Result<(Vec<VariableSpec>, Vec<PartitionPlacement>), CatalogueError> {
    let mut reader = FieldReader::new("Catalogue", bytes);
    let format = u16::take(&mut reader)?;
    if format != FORMAT {
        return Err(reader.invalid("format", format.into()).into());
    }
    let count = u32::take(&mut reader)?;
    let mut variables = Vec::new();
    for _ in 0..count {
        variables.push(take_variable(&mut reader)?);
    }
    let count = u32::take(&mut reader)?;
    let mut places = Vec::new();
    for _ in 0..count {
        let variable = VariableId::take(&mut reader)?;
        let rows = u64::take(&mut reader)?..u64::take(&mut reader)?;
        places.push(PartitionPlacement { variable, rows, shard: ShardId::take(&mut reader)? });
    }
    reader.finish()?;
    Ok((variables, places))
}

/// The error for bytes that decode but are not the canonical encoding.
pub(super) fn not_canonical() -> CatalogueError {
    FieldReader::new("Catalogue", &[]).invalid("unused bytes of an initializer", 0).into()
}

const FORMAT: u16 = 2;

// Every valid variable name fits the wire format.
const _: () = assert!(VariableSpec::NAME_BYTES_MAX == NAME_BYTES_MAX);
