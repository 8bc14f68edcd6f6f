//! Residuals as bytes: a worker that goes on elsewhere takes them along.
//!
//! Little-endian: `ppleft` and two zeros, the catalogue's SHA-256, the number of variables as a `u64`;
//! for each its id and the code of its type as a `u32` each, the number of its elements as a `u64`,
//! the elements, zeros up to a multiple of 8; then the CRC-32C of all that as a `u64`.

use pushpull_common::catalogue::Catalogue;
use pushpull_common::codec::{Real, Residual};
use pushpull_common::ids::VariableId;
use pushpull_common::tensor::first_non_finite;
use thiserror::Error;

use super::{Compression, Left};

const MAGIC: [u8; 8] = *b"ppleft\0\0";

/// Why saved residuals are not those of this worker's variables. Nothing was changed.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ResidualsError {
    /// The bytes are no saved residuals, or not all of them, or damaged.
    #[error("cannot restore residuals: the bytes are damaged, or are none")]
    Damaged,
    /// They are of other variables, or of the same in other places.
    #[error("cannot restore residuals: they are of other variables")]
    OtherVariables,
    /// What was left of a variable whose gradients are not encoded any more would be lost.
    #[error("cannot restore residuals: {variable:?} has one, and is pushed as it is")]
    NotCompressed {
        /// The variable.
        variable: String,
    },
    /// The worker has not joined: it has no variables yet.
    #[error("cannot restore residuals before joining")]
    NotJoined,
}

impl Compression {
    /// All residuals as bytes.
    pub(crate) fn save(&self, catalogue: &Catalogue) -> Vec<u8> {
        let mut out = MAGIC.to_vec();
        out.extend(catalogue.digest());
        out.extend((self.variables.len() as u64).to_le_bytes());
        for (id, compressed) in &self.variables {
            let code = catalogue.variable(*id).dtype().master().code();
            out.extend(id.0.to_le_bytes());
            out.extend(u32::from(code).to_le_bytes());
            match &compressed.left {
                Left::F32(left) => put(left.left(), f32::to_le_bytes, &mut out),
                Left::F64(left) => put(left.left(), f64::to_le_bytes, &mut out),
            }
        }
        let crc = u64::from(crc32c::crc32c(&out));
        out.extend(crc.to_le_bytes());
        out
    }

    /// Takes residuals back. Those of variables that are not among them begin anew.
    pub(crate) fn restore(
        &mut self,
        catalogue: &Catalogue,
        bytes: &[u8],
    ) -> Result<(), ResidualsError> {
        let (body, crc) = bytes.split_last_chunk().ok_or(ResidualsError::Damaged)?;
        if u64::from_le_bytes(*crc) != u64::from(crc32c::crc32c(body)) {
            return Err(ResidualsError::Damaged);
        }
        let mut rest = body;
        if take::<8>(&mut rest)? != MAGIC {
            return Err(ResidualsError::Damaged);
        }
        if take::<32>(&mut rest)? != catalogue.digest() {
            return Err(ResidualsError::OtherVariables);
        }
        let count = u64::from_le_bytes(take(&mut rest)?);
        let mut found = Vec::new();
        // Each takes bytes, so the count is not believed further than there are some.
        for _ in 0..count {
            let id = VariableId(u32::from_le_bytes(take(&mut rest)?));
            let code = u32::from_le_bytes(take(&mut rest)?);
            let elements = u64::from_le_bytes(take(&mut rest)?);
            let variable = catalogue.variables().get(id.0 as usize);
            let variable = variable.ok_or(ResidualsError::Damaged)?;
            let dtype = variable.dtype().master();
            let same = u32::from(dtype.code()) == code && variable.shape().elements() == elements;
            let (values, tail) = rest
                .split_at_checked(variable.master_bytes().next_multiple_of(8) as usize)
                .filter(|_| same)
                .ok_or(ResidualsError::Damaged)?;
            let values = &values[..variable.master_bytes() as usize];
            if first_non_finite(dtype, values).is_some() {
                // No sum of gradients that were pushed comes to that.
                return Err(ResidualsError::Damaged);
            }
            (rest, _) = (tail, found.push((id, values)));
        }
        if !rest.is_empty() {
            return Err(ResidualsError::Damaged);
        }
        for (id, _) in &found {
            if !self.covers(*id) {
                let variable = catalogue.variable(*id).name().to_owned();
                return Err(ResidualsError::NotCompressed { variable });
            }
        }
        for (id, compressed) in &mut self.variables {
            let saved = found.iter().find(|(other, _)| other == id).map(|(_, values)| *values);
            match &mut compressed.left {
                Left::F32(left) => *left = residual(left, saved, f32::from_le_bytes),
                Left::F64(left) => *left = residual(left, saved, f64::from_le_bytes),
            }
        }
        Ok(())
    }
}

fn put<T: Real, const N: usize>(left: &[T], bytes: impl Fn(T) -> [u8; N], out: &mut Vec<u8>) {
    out.extend((left.len() as u64).to_le_bytes());
    left.iter().for_each(|&value| out.extend(bytes(value)));
    out.resize(out.len().next_multiple_of(8), 0);
}

fn residual<T: Real, const N: usize>(
    old: &Residual<T>,
    saved: Option<&[u8]>,
    value: impl Fn([u8; N]) -> T,
) -> Residual<T> {
    match saved {
        None => Residual::new(old.left().len()),
        Some(bytes) => {
            Residual::from_left(bytes.as_chunks().0.iter().map(|bytes| value(*bytes)).collect())
        }
    }
}

fn take<const N: usize>(rest: &mut &[u8]) -> Result<[u8; N], ResidualsError> {
    let (taken, tail) = rest.split_first_chunk().ok_or(ResidualsError::Damaged)?;
    *rest = tail;
    Ok(*taken)
}
