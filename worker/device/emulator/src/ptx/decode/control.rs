//! Decodes branches, calls and barriers.

use super::{Decoder, Name};
use crate::ptx::error::PtxError;
use crate::ptx::instruction::{BarrierKind, CallInstruction, PtxOperation, ZERO};
use crate::ptx::layout::Layout;
use crate::ptx::syntax::{InstructionSyntax, Operand, Variable};
use crate::scalar::Type;

impl Decoder<'_> {
    pub(super) fn control(&mut self, written: &InstructionSyntax) -> Result<Option<()>, PtxError> {
        let operation = match written.words[0].as_str() {
            "bra" => return self.branch(written),
            "brx" => return self.branch_table(written),
            "call" => return self.call(written),
            "bar" | "barrier" => return self.barrier(written),
            "ret" if self.function.is_entry => PtxOperation::Exit,
            "ret" => PtxOperation::Return,
            "exit" => PtxOperation::Exit,
            "trap" => PtxOperation::Trap,
            "nanosleep" => PtxOperation::Nothing,
            _ => return Ok(None),
        };
        self.emit(operation);
        Ok(Some(()))
    }

    fn branch(&mut self, written: &InstructionSyntax) -> Result<Option<()>, PtxError> {
        let [Operand::Name(label)] = written.operands.as_slice() else { return Ok(None) };
        let at = self.code.instructions.len();
        self.branches.push((at, self.line, vec![label.clone()]));
        self.emit(PtxOperation::Branch { target: 0 });
        Ok(Some(()))
    }

    fn branch_table(&mut self, written: &InstructionSyntax) -> Result<Option<()>, PtxError> {
        let [index, Operand::Name(table)] = written.operands.as_slice() else { return Ok(None) };
        let index = self.source(index, Type::U32)?;
        let targets = self.targets.get(table).cloned();
        let targets = targets.ok_or_else(|| self.unknown_name(table))?;
        self.branches.push((self.code.instructions.len(), self.line, targets));
        self.emit(PtxOperation::BranchTable { index, targets: Box::default() });
        Ok(Some(()))
    }

    /// `call (results), function, (arguments)`, where each part but the function may be missing.
    fn call(&mut self, written: &InstructionSyntax) -> Result<Option<()>, PtxError> {
        let none = [];
        let (results, name, arguments) = match written.operands.as_slice() {
            [Operand::Name(name)] => (&none[..], name, &none[..]),
            [Operand::Name(name), Operand::List(arguments)] => (&none[..], name, &arguments[..]),
            [Operand::List(results), Operand::Name(name)] => (&results[..], name, &none[..]),
            [Operand::List(results), Operand::Name(name), Operand::List(arguments)] => {
                (&results[..], name, &arguments[..])
            }
            _ => return Ok(None),
        };
        let callee = self.symbols.functions.iter().position(|function| function.name == *name);
        let Some(callee) = callee else { return Err(self.unknown_name(name)) };
        let function = &self.symbols.functions[callee];
        let mut layout = Layout::default();
        let mut call =
            CallInstruction { function: callee as u32, arguments: Vec::new(), results: Vec::new() };
        call.results = self.copies(results, &function.results, &mut layout)?;
        call.arguments = self.copies(arguments, &function.parameters, &mut layout)?;
        self.emit(PtxOperation::Call(Box::new(call)));
        Ok(Some(()))
    }

    fn copies(
        &mut self,
        here: &[Operand],
        there: &[Variable],
        layout: &mut Layout,
    ) -> Result<Vec<(u32, u32, u32)>, PtxError> {
        if here.len() != there.len() {
            return Err(self.unknown());
        }
        let mut copies = Vec::new();
        for (operand, variable) in here.iter().zip(there) {
            let Operand::Name(name) = operand else { return Err(self.unknown()) };
            let Some(Name::Parameter(at, size)) = self.lookup(name) else {
                return Err(self.unknown_name(name));
            };
            let place = layout.append(variable) as u32;
            copies.push((at as u32, place, size.min(variable.size as u32)));
        }
        Ok(copies)
    }

    fn barrier(&mut self, written: &InstructionSyntax) -> Result<Option<()>, PtxError> {
        let words: Vec<&str> =
            written.words.iter().map(String::as_str).filter(|&word| word != "aligned").collect();
        let operands = written.operands.as_slice();
        // Barriers other than the first, and barriers of a part of a block, are not supported.
        match (words.as_slice(), operands) {
            (["bar", "warp", "sync"], [members]) => {
                let members = self.source(members, Type::B32)?;
                self.emit(PtxOperation::WarpBarrier { members });
            }
            ([_, "sync"], [Operand::Integer(0)]) => {
                let kind = BarrierKind::Synchronize;
                self.emit(PtxOperation::Barrier { kind, d: ZERO, a: ZERO, negated: false });
            }
            ([_, "red", kind, _], [target, Operand::Integer(0), predicate]) => {
                let kind = match *kind {
                    "popc" => BarrierKind::Count,
                    "and" => BarrierKind::All,
                    "or" => BarrierKind::Any,
                    _ => return Ok(None),
                };
                let (d, _) = self.destination(target)?;
                let (a, negated) = self.predicate(predicate)?;
                self.emit(PtxOperation::Barrier { kind, d, a, negated });
            }
            _ => return Ok(None),
        }
        Ok(Some(()))
    }
}
