//! Decodes arithmetic, comparisons, conversions and moves.

use super::Decoder;
use crate::ptx::error::PtxError;
use crate::ptx::instruction::{PtxOperation, Register, ZERO};
use crate::ptx::syntax::{InstructionSyntax, Operand};
use crate::scalar::{
    Carry, CarryOperation, Conversion, Rounding, Type, binary, comparison, ternary, unary,
};

impl Decoder<'_> {
    /// Returns `None` if the instruction is not known.
    pub(super) fn arithmetic(
        &mut self,
        written: &InstructionSyntax,
    ) -> Result<Option<()>, PtxError> {
        let Some(of) = written.words.last().and_then(|word| Type::parse(word)) else {
            return Ok(None);
        };
        match written.words[0].as_str() {
            "mov" => self.mov(written, of),
            "cvt" => self.cvt(written, of),
            "setp" | "set" => self.compare(written, of),
            "bfi" => self.insert(written, of),
            _ if is_carry(&written.words) => self.carry(written, of),
            _ => self.function(written, of),
        }
    }

    /// An instruction that is one function of its operands, perhaps with a modifier for subnormal
    /// numbers or for saturation.
    fn function(&mut self, written: &InstructionSyntax, of: Type) -> Result<Option<()>, PtxError> {
        let words = &written.words[..written.words.len() - 1];
        // The approximations of 64-bit floats have `ftz` in their names.
        let flushes = of == Type::F32 && words.iter().any(|word| word == "ftz");
        let saturates = of.is_float() && words.iter().any(|word| word == "sat");
        let kept =
            words.iter().filter(|&word| !(flushes && word == "ftz" || saturates && word == "sat"));
        let name = kept.map(String::as_str).collect::<Vec<_>>().join(".");
        let Some((target, sources)) = written.operands.split_first() else { return Ok(None) };
        // Before the operands, for an instruction that is not known may have others.
        let known = match sources.len() {
            1 => unary(&name, of).is_some(),
            2 => binary(&name, of).is_some(),
            3 => ternary(&name, of).is_some(),
            _ => false,
        };
        if !known {
            return Ok(None);
        }
        let (d, _) = self.destination(target)?;
        let mut registers = Vec::new();
        for (at, source) in sources.iter().enumerate() {
            let register = self.source(source, operand_type(&name, at, of))?;
            registers.push(if flushes { self.flushed(register, of)? } else { register });
        }
        let operation = match *registers.as_slice() {
            [a] => unary(&name, of).map(|f| PtxOperation::Unary { f, d, a }),
            [a, b] if !of.is_float() && (name == "div" || name == "rem") => {
                binary(&name, of).map(|f| PtxOperation::Divide { f, of, d, a, b })
            }
            [a, b] => binary(&name, of).map(|f| PtxOperation::Binary { f, d, a, b }),
            [a, b, c] => ternary(&name, of).map(|f| PtxOperation::Ternary { f, d, a, b, c }),
            _ => None,
        };
        let Some(operation) = operation else { return Ok(None) };
        self.emit(operation);
        for (step, wanted) in [("flush", flushes), ("saturate", saturates)] {
            if wanted {
                let f = unary(step, of).ok_or_else(|| self.unknown())?;
                self.emit(PtxOperation::Unary { f, d, a: d });
            }
        }
        Ok(Some(()))
    }

    fn flushed(&mut self, a: Register, of: Type) -> Result<Register, PtxError> {
        let f = unary("flush", of).ok_or_else(|| self.unknown())?;
        let d = self.new_register();
        self.emit(PtxOperation::Unary { f, d, a });
        Ok(d)
    }

    fn mov(&mut self, written: &InstructionSyntax, of: Type) -> Result<Option<()>, PtxError> {
        match written.operands.as_slice() {
            [Operand::List(parts), _] | [_, Operand::List(parts)]
                if !matches!(parts.len(), 2 | 4 | 8) =>
            {
                Ok(None)
            }
            [Operand::List(parts), whole] => self.unpack(parts, whole, of),
            [whole, Operand::List(parts)] => self.pack(whole, parts, of),
            [target, source] => {
                let (d, _) = self.destination(target)?;
                let a = self.source(source, of)?;
                self.emit(PtxOperation::Move { d, a });
                Ok(Some(()))
            }
            _ => Ok(None),
        }
    }

    fn unpack(
        &mut self,
        parts: &[Operand],
        whole: &Operand,
        of: Type,
    ) -> Result<Option<()>, PtxError> {
        let a = self.source(whole, of)?;
        let length = of.bits() / parts.len() as u32;
        let c = self.constant(u64::from(length));
        let f = ternary("bfe", Type::U64);
        let Some(f) = f else { return Ok(None) };
        for (at, part) in parts.iter().enumerate() {
            let (d, _) = self.destination(part)?;
            let b = self.constant(u64::from(length) * at as u64);
            self.emit(PtxOperation::Ternary { f, d, a, b, c });
        }
        Ok(Some(()))
    }

    fn pack(
        &mut self,
        whole: &Operand,
        parts: &[Operand],
        of: Type,
    ) -> Result<Option<()>, PtxError> {
        let (d, _) = self.destination(whole)?;
        let length = of.bits() / parts.len() as u32;
        let Some(f) = ternary("insert", Type::B64) else { return Ok(None) };
        // A part may be the whole, so the parts are put together elsewhere.
        let mut base = ZERO;
        for (at, part) in parts.iter().enumerate() {
            let a = self.source(part, of)?;
            let place = (u64::from(length) * at as u64) | (u64::from(length) << 8);
            let c = self.constant(place);
            let d = self.new_register();
            self.emit(PtxOperation::Ternary { f, d, a, b: base, c });
            base = d;
        }
        self.emit(PtxOperation::Move { d, a: base });
        Ok(Some(()))
    }

    /// `bfi` has five operands: the last two become one.
    fn insert(&mut self, written: &InstructionSyntax, of: Type) -> Result<Option<()>, PtxError> {
        let [target, field, base, position, length] = written.operands.as_slice() else {
            return Ok(None);
        };
        let functions =
            (ternary("insert", of), ternary("bfe", Type::U64), ternary("insert", Type::B64));
        let (Some(f), Some(extract), Some(merge)) = functions else { return Ok(None) };
        let (d, _) = self.destination(target)?;
        let a = self.source(field, of)?;
        let b = self.source(base, of)?;
        let position = self.source(position, Type::U32)?;
        let length = self.source(length, Type::U32)?;
        let low = self.new_register();
        let byte = self.constant(8);
        let second = self.constant(8 | 8 << 8);
        self.emit(PtxOperation::Ternary { f: extract, d: low, a: position, b: ZERO, c: byte });
        let c = self.new_register();
        self.emit(PtxOperation::Ternary { f: merge, d: c, a: length, b: low, c: second });
        self.emit(PtxOperation::Ternary { f, d, a, b, c });
        Ok(Some(()))
    }

    fn cvt(&mut self, written: &InstructionSyntax, from: Type) -> Result<Option<()>, PtxError> {
        let [target, source] = written.operands.as_slice() else { return Ok(None) };
        let words = &written.words[1..written.words.len() - 1];
        let Some((to, words)) = words.split_last() else { return Ok(None) };
        let Some(to) = Type::parse(to) else { return Ok(None) };
        let mut how =
            Conversion { from, to, rounding: Rounding::Nearest, integral: false, saturates: false };
        let mut flushes = false;
        for word in words {
            match (word.as_str(), Rounding::parse(word)) {
                (_, Some(rounding)) => {
                    how.rounding = rounding;
                    how.integral = word.ends_with('i') && to.is_float();
                }
                ("sat", _) => how.saturates = true,
                ("ftz", _) => flushes = true,
                _ => return Ok(None),
            }
        }
        let (d, held) = self.destination(target)?;
        let mut a = self.source(source, from)?;
        if flushes && from == Type::F32 {
            a = self.flushed(a, from)?;
        }
        self.emit(PtxOperation::Convert { how, d, a });
        if flushes && to == Type::F32 {
            let f = unary("flush", to).ok_or_else(|| self.unknown())?;
            self.emit(PtxOperation::Unary { f, d, a: d });
        }
        if to.is_signed() && held.bits() > to.bits() {
            // A narrow result fills a wider register with its sign.
            let wider = match held.size() {
                2 => Type::S16,
                4 => Type::S32,
                _ => Type::S64,
            };
            let how = Conversion { from: to, to: wider, saturates: false, ..how };
            self.emit(PtxOperation::Convert { how, d, a: d });
        }
        Ok(Some(()))
    }

    fn compare(&mut self, written: &InstructionSyntax, of: Type) -> Result<Option<()>, PtxError> {
        let is_set = written.words[0] == "set";
        let mut words: Vec<&str> = written.words[1..].iter().map(String::as_str).collect();
        words.pop();
        let result = if is_set { words.pop().and_then(Type::parse) } else { Some(Type::Pred) };
        let flushes = of == Type::F32 && words.contains(&"ftz");
        words.retain(|&word| word != "ftz");
        let (name, join) = match *words.as_slice() {
            [name] => (name, None),
            [name, join @ ("and" | "or" | "xor")] => (name, binary(join, Type::Pred)),
            _ => return Ok(None),
        };
        let (Some(f), Some(result)) = (comparison(name, of), result) else { return Ok(None) };
        let [target, left, right, rest @ ..] = written.operands.as_slice() else { return Ok(None) };
        let (target, q) = match target {
            Operand::Pair(d, q) => {
                (Operand::Name(d.clone()), self.destination(&Operand::Name(q.clone()))?.0)
            }
            other => (other.clone(), self.new_register()),
        };
        let (target, _) = self.destination(&target)?;
        let mut a = self.source(left, of)?;
        let mut b = self.source(right, of)?;
        if flushes {
            a = self.flushed(a, of)?;
            b = self.flushed(b, of)?;
        }
        let combine = match (join, rest) {
            (Some(join), [predicate]) => Some((join, self.source(predicate, Type::Pred)?)),
            (None, []) => None,
            _ => return Ok(None),
        };
        let d = if is_set { self.new_register() } else { target };
        self.emit(PtxOperation::Compare { f, combine, d, q, a, b });
        if is_set {
            let one = if result.is_float() { u64::from(1f32.to_bits()) } else { result.mask() };
            let (a, Some(f)) = (self.constant(one), ternary("selp", result)) else {
                return Ok(None);
            };
            self.emit(PtxOperation::Ternary { f, d: target, a, b: ZERO, c: d });
        }
        Ok(Some(()))
    }

    fn carry(&mut self, written: &InstructionSyntax, of: Type) -> Result<Option<()>, PtxError> {
        let words: Vec<&str> = written.words.iter().map(String::as_str).collect();
        let (operation, takes) = match (words[0], words.get(1).copied()) {
            ("add", _) => (CarryOperation::Add, false),
            ("addc", _) => (CarryOperation::Add, true),
            ("sub", _) => (CarryOperation::Subtract, false),
            ("subc", _) => (CarryOperation::Subtract, true),
            ("mad", Some("lo")) => (CarryOperation::MultiplyLow, false),
            ("madc", Some("lo")) => (CarryOperation::MultiplyLow, true),
            ("mad", Some("hi")) => (CarryOperation::MultiplyHigh, false),
            ("madc", Some("hi")) => (CarryOperation::MultiplyHigh, true),
            _ => return Ok(None),
        };
        if of.is_float() || of.bits() < 32 {
            return Ok(None);
        }
        let how = Carry { operation, of, takes, sets: words.contains(&"cc") };
        let count = if words[0].starts_with("mad") { 3 } else { 2 };
        if written.operands.len() != count + 1 {
            return Ok(None);
        }
        let (d, _) = self.destination(&written.operands[0])?;
        let mut sources = [ZERO; 3];
        for (source, operand) in sources.iter_mut().zip(&written.operands[1..]) {
            *source = self.source(operand, of)?;
        }
        let [a, b, c] = sources;
        self.emit(PtxOperation::Carry { how, d, a, b, c });
        Ok(Some(()))
    }
}

fn is_carry(words: &[String]) -> bool {
    matches!(words[0].as_str(), "addc" | "subc" | "madc") || words.iter().any(|word| word == "cc")
}

/// The type of an operand that is not of the instruction's type.
fn operand_type(name: &str, at: usize, of: Type) -> Type {
    match (name, at) {
        ("shl" | "shr", 1) | ("bfe", 1 | 2) => Type::U32,
        ("mad.wide", 2) => of.doubled().unwrap_or(of),
        ("selp", 2) => Type::Pred,
        _ => of,
    }
}
