//! Residuals as bytes, with which a worker resumes elsewhere.
//!
//! Little-endian:
//!
//! - `ppleft` and two zeros, the catalogue's SHA-256, the number of variables as a `u64`;
//! - for each variable its id and the code of its type, a `u32` each, the number of its elements as
//!   a `u64`, the elements, and zeros up to a multiple of 8;
//! - the CRC-32C of all these bytes as a `u64`.
//!
//! A sparse variable has the number of rows instead of elements, followed by their ids as `u64`s.

use pushpull_common::catalogue::Catalogue;
use pushpull_common::codec::{Real, Residual};
use pushpull_common::finite::first_non_finite;
use pushpull_common::ids::VariableId;
use pushpull_common::tensor::elements_of;

use super::rows::RowResiduals;
use super::{Compression, VariableResidual};
use crate::error::Error;

const MAGIC: [u8; 8] = *b"ppleft\0\0";

impl Compression {
    /// Returns all residuals as bytes. Fails if a device does.
    pub(crate) fn save(&self, catalogue: &Catalogue) -> Result<Vec<u8>, Error> {
        let mut out = MAGIC.to_vec();
        out.extend(catalogue.digest());
        out.extend((self.variables.len() as u64).to_le_bytes());
        for (id, compressed) in &self.variables {
            let code = catalogue.variable(*id).dtype().master().code();
            out.extend(id.0.to_le_bytes());
            out.extend(u32::from(code).to_le_bytes());
            match &compressed.residual {
                VariableResidual::F32(left) => put_all(left, &mut out),
                VariableResidual::OnDevice(left) => put_all(&left.read()?, &mut out),
                VariableResidual::F64(left) => put_all(left, &mut out),
                VariableResidual::RowsF32(left) => put_rows(left, &mut out),
                VariableResidual::RowsF64(left) => put_rows(left, &mut out),
            }
        }
        let crc = u64::from(crc32c::crc32c(&out));
        out.extend(crc.to_le_bytes());
        Ok(out)
    }

    /// Restores residuals. Those of variables that are not included start at zero.
    pub(crate) fn restore(&mut self, catalogue: &Catalogue, bytes: &[u8]) -> Result<(), Error> {
        let (body, crc) = bytes.split_last_chunk().ok_or(Error::DamagedResiduals)?;
        if u64::from_le_bytes(*crc) != u64::from(crc32c::crc32c(body)) {
            return Err(Error::DamagedResiduals);
        }
        let mut rest = body;
        if take::<8>(&mut rest)? != MAGIC {
            return Err(Error::DamagedResiduals);
        }
        if take::<32>(&mut rest)? != catalogue.digest() {
            return Err(Error::ForeignResiduals);
        }
        let count = u64::from_le_bytes(take(&mut rest)?);
        let mut found = Vec::new();
        // Each variable takes bytes, so a hostile count ends the loop early.
        for _ in 0..count {
            let saved = SavedResidual::take(catalogue, &mut rest)?;
            found.push(saved);
        }
        if !rest.is_empty() {
            return Err(Error::DamagedResiduals);
        }
        for saved in &found {
            if !self.covers(saved.id) {
                let variable = catalogue.variable(saved.id).name().to_owned();
                return Err(Error::ResidualWithoutCodec { variable });
            }
        }
        for (id, compressed) in &mut self.variables {
            let saved = found.iter().find(|saved| saved.id == *id);
            match &mut compressed.residual {
                VariableResidual::F32(left) => *left = residual(left.left().len(), saved),
                VariableResidual::F64(left) => *left = residual(left.left().len(), saved),
                VariableResidual::OnDevice(left) => {
                    compressed.residual = VariableResidual::F32(residual(left.len(), saved));
                }
                VariableResidual::RowsF32(left) => *left = rows(left, saved),
                VariableResidual::RowsF64(left) => *left = rows(left, saved),
            }
        }
        Ok(())
    }
}

/// The saved residual of one variable.
struct SavedResidual<'a> {
    id: VariableId,
    /// The ids of its rows, if it is sparse.
    ids: &'a [u8],
    elements: &'a [u8],
}

impl<'a> SavedResidual<'a> {
    /// Takes the next saved residual from the rest of the bytes.
    fn take(catalogue: &Catalogue, rest: &mut &'a [u8]) -> Result<SavedResidual<'a>, Error> {
        let id = VariableId(u32::from_le_bytes(take(rest)?));
        let code = u32::from_le_bytes(take(rest)?);
        let count = u64::from_le_bytes(take(rest)?);
        let variable = catalogue.variables().get(id.0 as usize);
        let variable = variable.ok_or(Error::DamagedResiduals)?;
        let dtype = variable.dtype().master();
        let (ids, elements) = match variable.is_sparse() {
            true => (count.saturating_mul(8), count.saturating_mul(variable.master_row_bytes())),
            false => (0, variable.master_bytes()),
        };
        let same = u32::from(dtype.code()) == code
            && (variable.is_sparse() || variable.shape().elements() == count);
        let mut next = |bytes: u64| {
            let padded = bytes.checked_next_multiple_of(8)?;
            let (taken, tail) = rest.split_at_checked(usize::try_from(padded).ok()?)?;
            *rest = tail;
            Some(&taken[..bytes as usize])
        };
        let taken = next(ids).zip(next(elements)).filter(|_| same);
        let (ids, elements) = taken.ok_or(Error::DamagedResiduals)?;
        if first_non_finite(dtype, elements).is_some() {
            // No sum of pushed gradients is NaN or infinite.
            return Err(Error::DamagedResiduals);
        }
        Ok(SavedResidual { id, ids, elements })
    }
}

/// Appends the number of a dense variable's elements, and the elements.
fn put_all<T: Real>(left: &Residual<T>, out: &mut Vec<u8>) {
    out.extend((left.left().len() as u64).to_le_bytes());
    put(left.left(), out);
}

/// Appends elements, padded.
fn put<T: Real>(elements: &[T], out: &mut Vec<u8>) {
    out.extend_from_slice(bytemuck::cast_slice(elements));
    out.resize(out.len().next_multiple_of(8), 0);
}

/// Appends the number of rows, their ids and their elements.
fn put_rows<T: Real>(left: &RowResiduals<T>, out: &mut Vec<u8>) {
    let (ids, rows): (Vec<u64>, Vec<&[T]>) = left.left().unzip();
    out.extend((ids.len() as u64).to_le_bytes());
    ids.iter().for_each(|id| out.extend(id.to_le_bytes()));
    put(&rows.concat(), out);
}

fn residual<T: Real>(elements: usize, saved: Option<&SavedResidual<'_>>) -> Residual<T> {
    match saved {
        None => Residual::new(elements),
        Some(saved) => Residual::from_left(elements_of(saved.elements)),
    }
}

fn rows<T: Real>(old: &RowResiduals<T>, saved: Option<&SavedResidual<'_>>) -> RowResiduals<T> {
    let mut left = old.cleared();
    if let Some(saved) = saved {
        let elements: Vec<T> = elements_of(saved.elements);
        let ids = saved.ids.as_chunks().0.iter().map(|id| u64::from_le_bytes(*id));
        left.keep(ids.zip(elements.chunks_exact(old.width())));
    }
    left
}

fn take<const N: usize>(rest: &mut &[u8]) -> Result<[u8; N], Error> {
    let (taken, tail) = rest.split_first_chunk().ok_or(Error::DamagedResiduals)?;
    *rest = tail;
    Ok(*taken)
}
