//! Decodes loads, stores, atomic operations and changes of the address space.

use super::Decoder;
use crate::ptx::error::PtxError;
use crate::ptx::instruction::{
    AtomicOperation, LoadInstruction, PtxOperation, Space, StoreInstruction, ZERO,
};
use crate::ptx::syntax::{InstructionSyntax, Operand};
use crate::scalar::{Type, binary};

/// The generic address at which the shared memory of a block begins.
pub(crate) const SHARED_WINDOW: u64 = 0x1_0000_0000_0000;
/// The generic address at which the local memory of a thread begins.
pub(crate) const LOCAL_WINDOW: u64 = 0x2_0000_0000_0000;

impl Decoder<'_> {
    pub(super) fn memory(&mut self, written: &InstructionSyntax) -> Result<Option<()>, PtxError> {
        match written.words[0].as_str() {
            "membar" | "fence" | "prefetch" | "prefetchu" => {
                self.emit(PtxOperation::Nothing);
                Ok(Some(()))
            }
            "cvta" => self.change_space(written),
            "isspacep" => Ok(None),
            "atom" | "red" => self.atomic(written),
            _ => self.access(written),
        }
    }

    fn access(&mut self, written: &InstructionSyntax) -> Result<Option<()>, PtxError> {
        let Some(Modifiers { space, lanes, shared, of, .. }) = modifiers(&written.words[1..])
        else {
            return Ok(None);
        };
        let [first, second] = written.operands.as_slice() else { return Ok(None) };
        let is_store = written.words[0] == "st";
        let (place, value) = if is_store { (first, second) } else { (second, first) };
        let address = self.address(place, space)?;
        let values = match value {
            Operand::List(values) => values.clone(),
            value => vec![value.clone()],
        };
        if values.len() != usize::from(lanes) {
            return Ok(None);
        }
        let mut registers = [ZERO; 4];
        let mut mask = u64::MAX;
        for (register, value) in registers.iter_mut().zip(&values) {
            *register = if is_store {
                self.source(value, of)?
            } else {
                let (register, held) = self.destination(value)?;
                mask = held.mask();
                register
            };
        }
        self.emit(if is_store {
            PtxOperation::Store(StoreInstruction { address, of, lanes, shared, sources: registers })
        } else {
            PtxOperation::Load(LoadInstruction { address, of, lanes, shared, d: registers, mask })
        });
        Ok(Some(()))
    }

    fn atomic(&mut self, written: &InstructionSyntax) -> Result<Option<()>, PtxError> {
        let Some(Modifiers { space, of, atomic: Some(name), lanes: 1, .. }) =
            modifiers(&written.words[1..])
        else {
            return Ok(None);
        };
        let how = match name.as_str() {
            "cas" => AtomicOperation::CompareAndSwap,
            name => match binary(name, of) {
                Some(f) => AtomicOperation::Apply(f),
                None => return Ok(None),
            },
        };
        let (d, operands) = if written.words[0] == "red" {
            (self.new_register(), written.operands.as_slice())
        } else {
            let Some((target, rest)) = written.operands.split_first() else { return Ok(None) };
            (self.destination(target)?.0, rest)
        };
        let (place, a, b) = match (operands, how) {
            ([place, a], AtomicOperation::Apply(_)) => (place, self.source(a, of)?, ZERO),
            ([place, a, b], AtomicOperation::CompareAndSwap) => {
                (place, self.source(a, of)?, self.source(b, of)?)
            }
            _ => return Ok(None),
        };
        let address = self.address(place, space)?;
        self.emit(PtxOperation::Atomic { address, of, how, d, a, b });
        Ok(Some(()))
    }

    /// Global and constant addresses are generic ones. The others are in a window.
    fn change_space(&mut self, written: &InstructionSyntax) -> Result<Option<()>, PtxError> {
        let words: Vec<&str> = written.words[1..].iter().map(String::as_str).collect();
        let (space, to_space) = match *words.as_slice() {
            ["to", space, "u64"] => (space, true),
            [space, "u64"] => (space, false),
            _ => return Ok(None),
        };
        let window = match space {
            "global" | "const" => 0,
            "shared" => SHARED_WINDOW,
            "local" => LOCAL_WINDOW,
            _ => return Ok(None),
        };
        let [target, source] = written.operands.as_slice() else { return Ok(None) };
        let (d, _) = self.destination(target)?;
        let a = self.source(source, Type::U64)?;
        let b = self.constant(window);
        let Some(f) = binary(if to_space { "sub" } else { "add" }, Type::U64) else {
            return Ok(None);
        };
        self.emit(PtxOperation::Binary { f, d, a, b });
        Ok(Some(()))
    }
}

struct Modifiers {
    space: Space,
    lanes: u8,
    /// Whether other threads may access the same memory at the same time.
    shared: bool,
    of: Type,
    atomic: Option<String>,
}

fn modifiers(words: &[String]) -> Option<Modifiers> {
    let (of, words) = words.split_last()?;
    let of = Type::parse(of)?;
    let mut found = Modifiers { space: Space::Generic, lanes: 1, shared: false, of, atomic: None };
    for word in words {
        match word.as_str() {
            "global" => found.space = Space::Global,
            "const" => found.space = Space::Constant,
            "shared" => found.space = Space::Shared,
            "local" => found.space = Space::Local,
            "param" => found.space = Space::Parameter,
            "v2" => found.lanes = 2,
            "v4" => found.lanes = 4,
            "volatile" | "relaxed" | "acquire" | "release" | "acq_rel" => found.shared = true,
            // Scopes, and hints for caches.
            "weak" | "cta" | "gpu" | "sys" | "nc" | "ca" | "cg" | "cs" | "lu" | "cv" | "wb"
            | "wt" | "noftz" | "L1" | "L2" => {}
            "add" | "min" | "max" | "inc" | "dec" | "and" | "or" | "xor" | "exch" | "cas" => {
                found.atomic = Some(word.clone());
            }
            _ => return None,
        }
    }
    Some(found)
}
