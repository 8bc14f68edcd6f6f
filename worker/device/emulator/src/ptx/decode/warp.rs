//! Decodes instructions of the lanes of a warp together.

use super::Decoder;
use crate::ptx::error::PtxError;
use crate::ptx::instruction::{PtxOperation, Register, Shuffle, ShuffleMode, VoteKind};
use crate::ptx::syntax::{InstructionSyntax, Operand};
use crate::scalar::Type;

impl Decoder<'_> {
    pub(super) fn warp(&mut self, written: &InstructionSyntax) -> Result<Option<()>, PtxError> {
        let words: Vec<&str> = written.words.iter().map(String::as_str).collect();
        match (words.as_slice(), written.operands.as_slice()) {
            (["activemask", "b32"], [target]) => {
                let (d, _) = self.destination(target)?;
                self.emit(PtxOperation::ActiveMask { d });
            }
            (["shfl", "sync", mode, "b32"], [target, a, b, c, members]) => {
                let mode = match *mode {
                    "up" => ShuffleMode::Up,
                    "down" => ShuffleMode::Down,
                    "bfly" => ShuffleMode::Butterfly,
                    "idx" => ShuffleMode::Index,
                    _ => return Ok(None),
                };
                let (d, p) = self.pair(target)?;
                let a = self.source(a, Type::B32)?;
                let b = self.source(b, Type::B32)?;
                let c = self.source(c, Type::B32)?;
                let members = self.source(members, Type::B32)?;
                self.emit(PtxOperation::Shuffle(Shuffle { mode, d, p, a, b, c, members }));
            }
            (["vote", "sync", kind, _], [target, predicate, members]) => {
                let kind = match *kind {
                    "all" => VoteKind::All,
                    "any" => VoteKind::Any,
                    "uni" => VoteKind::Uniform,
                    "ballot" => VoteKind::Ballot,
                    _ => return Ok(None),
                };
                let (d, _) = self.destination(target)?;
                let (a, negated) = self.predicate(predicate)?;
                let members = self.source(members, Type::B32)?;
                self.emit(PtxOperation::Vote { kind, d, a, negated, members });
            }
            (["match", kind @ ("any" | "all"), "sync", of], [target, a, members]) => {
                let Some(of) = Type::parse(of) else { return Ok(None) };
                let (d, q) = self.pair(target)?;
                let a = self.source(a, of)?;
                let members = self.source(members, Type::B32)?;
                self.emit(PtxOperation::Match { all: *kind == "all", d, q, a, members });
            }
            _ => return Ok(None),
        }
        Ok(Some(()))
    }

    /// A destination with or without a predicate beside it.
    fn pair(&mut self, target: &Operand) -> Result<(Register, Register), PtxError> {
        match target {
            Operand::Pair(d, p) => {
                let (d, _) = self.destination(&Operand::Name(d.clone()))?;
                let (p, _) = self.destination(&Operand::Name(p.clone()))?;
                Ok((d, p))
            }
            target => Ok((self.destination(target)?.0, self.new_register())),
        }
    }

    /// A predicate, and whether it is negated.
    pub(super) fn predicate(&mut self, operand: &Operand) -> Result<(Register, bool), PtxError> {
        match operand {
            Operand::Not(name) => Ok((self.register(name)?.0, true)),
            operand => Ok((self.source(operand, Type::Pred)?, false)),
        }
    }
}
