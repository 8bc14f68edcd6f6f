//! The byte encoding of fields: a bounded reader, a writer, and the types of fields.
//!
//! Every integer is little-endian with an explicit width. Text and lists have their largest length
//! in their type, so that no field can be read without its limit.

use smallvec::SmallVec;

use super::error::ProtocolError;
use super::feature::Features;

/// Reads fields from the front of a meta. If one field does not fit, the whole meta is rejected.
#[derive(Debug)]
pub struct FieldReader<'a> {
    message: &'static str,
    rest: &'a [u8],
    features: Features,
}

impl<'a> FieldReader<'a> {
    /// Creates a reader for the meta of the message with this name, written for a peer without
    /// features.
    pub fn new(message: &'static str, bytes: &'a [u8]) -> Self {
        FieldReader { message, rest: bytes, features: Features::NONE }
    }

    /// Makes the reader expect the fields of these agreed features.
    pub fn with(self, features: Features) -> Self {
        FieldReader { features, ..self }
    }

    /// Returns the agreed features.
    pub fn features(&self) -> Features {
        self.features
    }

    /// Takes the next `count` bytes for a field of this type.
    pub fn take(&mut self, count: usize, field: &'static str) -> Result<&'a [u8], ProtocolError> {
        let Some((taken, rest)) = self.rest.split_at_checked(count) else {
            return Err(ProtocolError::Truncated { message: self.message, field });
        };
        self.rest = rest;
        Ok(taken)
    }

    /// Takes the next `N` bytes as an array.
    pub fn array<const N: usize>(&mut self, field: &'static str) -> Result<[u8; N], ProtocolError> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N, field)?);
        Ok(array)
    }

    /// Returns the number of bytes left.
    pub fn left(&self) -> usize {
        self.rest.len()
    }

    /// Returns the error for a field with an invalid value.
    pub fn invalid(&self, field: &'static str, found: u64) -> ProtocolError {
        ProtocolError::Invalid { message: self.message, field, found }
    }

    /// Checks that no bytes are left.
    pub fn finish(self) -> Result<(), ProtocolError> {
        match self.rest.len() {
            0 => Ok(()),
            bytes => Err(ProtocolError::Trailing { message: self.message, bytes }),
        }
    }
}

/// Takes the bytes of fields. A plain vector is for a peer without features.
pub trait FieldSink {
    /// Appends bytes.
    fn put_bytes(&mut self, bytes: &[u8]);

    /// Returns the agreed features: the fields that belong to others are left out.
    fn features(&self) -> Features {
        Features::NONE
    }
}

impl FieldSink for Vec<u8> {
    fn put_bytes(&mut self, bytes: &[u8]) {
        self.extend_from_slice(bytes);
    }
}

/// Appends fields for a peer with which these features are agreed.
#[derive(Debug)]
pub struct FeatureSink<'a> {
    /// The bytes.
    pub bytes: &'a mut Vec<u8>,
    /// The agreed features.
    pub features: Features,
}

impl FieldSink for FeatureSink<'_> {
    fn put_bytes(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    fn features(&self) -> Features {
        self.features
    }
}

/// A type that can be a field of a message.
pub trait Wire: Sized {
    /// Appends the field.
    fn put(&self, out: &mut impl FieldSink);
    /// Takes the field from the front.
    fn take(reader: &mut FieldReader<'_>) -> Result<Self, ProtocolError>;
}

macro_rules! integers {
    ($($int:ty),*) => {$(
        impl Wire for $int {
            fn put(&self, out: &mut impl FieldSink) {
                out.put_bytes(&self.to_le_bytes());
            }

            fn take(reader: &mut FieldReader<'_>) -> Result<Self, ProtocolError> {
                Ok(<$int>::from_le_bytes(reader.array(stringify!($int))?))
            }
        }
    )*};
}
integers!(u8, u16, u32, u64);

macro_rules! newtypes {
    ($($name:ident),*) => {$(
        impl Wire for crate::ids::$name {
            fn put(&self, out: &mut impl FieldSink) {
                self.0.put(out);
            }

            fn take(reader: &mut FieldReader<'_>) -> Result<Self, ProtocolError> {
                Ok(Self(Wire::take(reader)?))
            }
        }
    )*};
}
newtypes!(
    VariableId,
    PartitionId,
    RequestId,
    GlobalStep,
    TokenId,
    Sequence,
    ClientEpoch,
    RestoreEpoch,
    ConfigEpoch,
    Incarnation,
    CoordinatorId,
    CoordinatorEpoch,
    EffectNumber
);

impl Wire for f64 {
    fn put(&self, out: &mut impl FieldSink) {
        self.to_bits().put(out);
    }

    fn take(reader: &mut FieldReader<'_>) -> Result<Self, ProtocolError> {
        Ok(f64::from_bits(u64::take(reader)?))
    }
}

impl Wire for bool {
    fn put(&self, out: &mut impl FieldSink) {
        u8::from(*self).put(out);
    }

    fn take(reader: &mut FieldReader<'_>) -> Result<Self, ProtocolError> {
        match u8::take(reader)? {
            0 => Ok(false),
            1 => Ok(true),
            other => Err(reader.invalid("bool", other.into())),
        }
    }
}

impl Wire for crate::codec::Encodings {
    fn put(&self, out: &mut impl FieldSink) {
        self.0.put(out);
    }

    fn take(reader: &mut FieldReader<'_>) -> Result<Self, ProtocolError> {
        Ok(crate::codec::Encodings(u64::take(reader)?))
    }
}

impl<const N: usize> Wire for [u8; N] {
    fn put(&self, out: &mut impl FieldSink) {
        out.put_bytes(self);
    }

    fn take(reader: &mut FieldReader<'_>) -> Result<Self, ProtocolError> {
        reader.array("bytes")
    }
}

impl<T: Wire> Wire for Option<T> {
    fn put(&self, out: &mut impl FieldSink) {
        self.is_some().put(out);
        if let Some(value) = self {
            value.put(out);
        }
    }

    fn take(reader: &mut FieldReader<'_>) -> Result<Self, ProtocolError> {
        Ok(if bool::take(reader)? { Some(T::take(reader)?) } else { None })
    }
}

impl<T: Wire> Wire for Box<T> {
    fn put(&self, out: &mut impl FieldSink) {
        (**self).put(out);
    }

    fn take(reader: &mut FieldReader<'_>) -> Result<Self, ProtocolError> {
        T::take(reader).map(Box::new)
    }
}

impl Wire for crate::ids::ShardId {
    fn put(&self, out: &mut impl FieldSink) {
        self.task.put(out);
        self.shard.put(out);
    }

    fn take(reader: &mut FieldReader<'_>) -> Result<Self, ProtocolError> {
        Ok(Self { task: Wire::take(reader)?, shard: Wire::take(reader)? })
    }
}

/// UTF-8 text of at most `MAX` bytes, encoded as a `u16` length and the bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Text<const MAX: usize>(String);

impl<const MAX: usize> Text<MAX> {
    /// Creates a text; `None` if it is too long.
    pub fn new(text: impl Into<String>) -> Option<Self> {
        let text = text.into();
        (text.len() <= MAX).then_some(Text(text))
    }

    /// Creates a text, cut at a character boundary if it is too long; for explanations.
    pub fn clipped(text: impl Into<String>) -> Self {
        let mut text = text.into();
        while text.len() > MAX {
            text.pop();
        }
        Text(text)
    }

    /// Creates a text, whose middle is cut out if it is too long: a chain of errors starts with
    /// what failed here, and ends with the cause.
    pub fn shortened(text: impl Into<String>) -> Self {
        const CUT: &str = " [...] ";
        let text = text.into();
        if text.len() <= MAX || MAX < CUT.len() {
            return Text::clipped(text);
        }
        let is_boundary = |at: &usize| text.is_char_boundary(*at);
        let kept = MAX - CUT.len();
        let start = (0..=kept / 3).rev().find(is_boundary).unwrap_or(0);
        let after = text.len() - (kept - start);
        let end = (after..text.len()).find(is_boundary).unwrap_or(text.len());
        Text(format!("{}{CUT}{}", &text[..start], &text[end..]))
    }

    /// Returns the text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl<const MAX: usize> std::fmt::Display for Text<MAX> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl<const MAX: usize> Wire for Text<MAX> {
    fn put(&self, out: &mut impl FieldSink) {
        // Fits: a `Text` has at most MAX bytes, and every MAX is below 2^16.
        (self.0.len() as u16).put(out);
        out.put_bytes(self.0.as_bytes());
    }

    fn take(reader: &mut FieldReader<'_>) -> Result<Self, ProtocolError> {
        let count = usize::from(u16::take(reader)?);
        if count > MAX {
            return Err(reader.invalid("text length", count as u64));
        }
        match std::str::from_utf8(reader.take(count, "text")?) {
            Ok(text) => Ok(Text(text.to_owned())),
            Err(error) => Err(reader.invalid("text byte", error.valid_up_to() as u64)),
        }
    }
}

/// A list of at most `MAX` items, encoded as a `u32` count and the items; up to `FEW` are stored
/// inline.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct List<T, const MAX: usize, const FEW: usize = 0>(SmallVec<[T; FEW]>);

impl<T, const MAX: usize, const FEW: usize> Default for List<T, MAX, FEW> {
    fn default() -> Self {
        List(SmallVec::new())
    }
}

impl<T, const MAX: usize, const FEW: usize> List<T, MAX, FEW> {
    /// Creates a list from a vector; `None` if there are too many items.
    pub fn new(items: Vec<T>) -> Option<Self> {
        List::of(items)
    }

    /// Creates a list from any items, without a vector; `None` if there are too many.
    pub fn of(items: impl IntoIterator<Item = T>) -> Option<Self> {
        let items: SmallVec<[T; FEW]> = items.into_iter().collect();
        (items.len() <= MAX).then_some(List(items))
    }

    /// Returns the items, to be changed.
    pub fn items_mut(&mut self) -> &mut [T] {
        &mut self.0
    }

    /// Returns the items.
    pub fn items(&self) -> &[T] {
        &self.0
    }
}

impl<T: Wire, const MAX: usize, const FEW: usize> Wire for List<T, MAX, FEW> {
    fn put(&self, out: &mut impl FieldSink) {
        (self.0.len() as u32).put(out);
        for item in &self.0 {
            item.put(out);
        }
    }

    fn take(reader: &mut FieldReader<'_>) -> Result<Self, ProtocolError> {
        let count = u32::take(reader)? as usize;
        // Every item has at least one byte, so a count above the bytes left is invalid. Nothing is
        // allocated for it.
        if count > MAX || count > reader.left() {
            return Err(reader.invalid("list length", count as u64));
        }
        let mut items = SmallVec::with_capacity(count);
        for _ in 0..count {
            items.push(T::take(reader)?);
        }
        Ok(List(items))
    }
}

impl<A: Wire, B: Wire> Wire for (A, B) {
    fn put(&self, out: &mut impl FieldSink) {
        self.0.put(out);
        self.1.put(out);
    }

    fn take(reader: &mut FieldReader<'_>) -> Result<Self, ProtocolError> {
        Ok((A::take(reader)?, B::take(reader)?))
    }
}

/// Declares a struct of public fields that are encoded in the order given. Fields that were added
/// later stand `behind` a feature: they are on the wire only if it is agreed, and have their
/// default values otherwise.
macro_rules! wire_struct {
    ($(#[$doc:meta])* $name:ident { $($(#[$field_doc:meta])* $field:ident: $type:ty,)* }
     $(behind $feature:ident {
        $($(#[$added_doc:meta])* $added:ident: $added_type:ty,)*
     })*) => {
        $(#[$doc])*
        #[derive(Clone, Debug, PartialEq)]
        pub struct $name {
            $($(#[$field_doc])* pub $field: $type,)*
            $($($(#[$added_doc])* pub $added: $added_type,)*)*
        }

        impl $crate::protocol::wire::Wire for $name {
            #[allow(unused_variables, reason = "a message may have no fields")]
            fn put(&self, out: &mut impl $crate::protocol::wire::FieldSink) {
                $($crate::protocol::wire::Wire::put(&self.$field, out);)*
                $(if out.features().contains($crate::protocol::Features::$feature) {
                    $($crate::protocol::wire::Wire::put(&self.$added, out);)*
                })*
            }

            #[allow(unused_variables, reason = "a message may have no fields")]
            fn take(
                reader: &mut $crate::protocol::wire::FieldReader<'_>,
            ) -> Result<Self, $crate::protocol::ProtocolError> {
                $(let $field = $crate::protocol::wire::Wire::take(reader)?;)*
                $($(let mut $added = Default::default();)*
                if reader.features().contains($crate::protocol::Features::$feature) {
                    $($added = $crate::protocol::wire::Wire::take(reader)?;)*
                })*
                Ok($name { $($field,)* $($($added,)*)* })
            }
        }
    };
}

/// Declares a sum type that is encoded as a one-byte tag and the fields of its variant.
macro_rules! wire_enum {
    ($(#[$doc:meta])* $name:ident {
        $($(#[$variant_doc:meta])* $tag:literal => $variant:ident {
            $($(#[$field_doc:meta])* $field:ident: $type:ty,)*
        },)*
    }) => {
        $(#[$doc])*
        #[derive(Clone, Debug, PartialEq)]
        pub enum $name {
            $($(#[$variant_doc])* $variant { $($(#[$field_doc])* $field: $type,)* },)*
        }

        impl $name {
            /// The names of all variants, in the order of their declaration.
            pub const VARIANTS: &'static [&'static str] = &[$(stringify!($variant)),*];
        }

        impl $crate::protocol::wire::Wire for $name {
            fn put(&self, out: &mut impl $crate::protocol::wire::FieldSink) {
                match self {
                    $($name::$variant { $($field,)* } => {
                        out.put_bytes(&[$tag]);
                        $($crate::protocol::wire::Wire::put($field, out);)*
                    })*
                }
            }

            fn take(
                reader: &mut $crate::protocol::wire::FieldReader<'_>,
            ) -> Result<Self, $crate::protocol::ProtocolError> {
                match u8::take(reader)? {
                    $($tag => Ok($name::$variant {
                        $($field: $crate::protocol::wire::Wire::take(reader)?,)*
                    }),)*
                    other => Err(reader.invalid(stringify!($name), other.into())),
                }
            }
        }
    };
}

pub(crate) use {wire_enum, wire_struct};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_text_keeps_its_start_and_its_end() {
        for character in ["x", "ü", "一", "𝄞"] {
            let text = format!("start{}end", character.repeat(600));
            let shown = Text::<512>::shortened(text.clone());
            assert!((500..=512).contains(&shown.as_str().len()), "{shown}");
            let (start, end) = shown.as_str().split_once(" [...] ").unwrap();
            assert!(text.starts_with(start) && text.ends_with(end) && end.ends_with("end"));
        }
        let whole = "y".repeat(512);
        assert_eq!(Text::<512>::shortened(whole.clone()).as_str(), whole);
        assert_eq!(Text::<5>::shortened("abcdefgh").as_str(), "abcde");
    }

    fn round_trip<T: Wire + PartialEq + std::fmt::Debug>(value: T) -> Vec<u8> {
        let mut bytes = Vec::new();
        value.put(&mut bytes);
        let mut reader = FieldReader::new("test", &bytes);
        assert_eq!(T::take(&mut reader).unwrap(), value);
        reader.finish().unwrap();
        bytes
    }

    #[test]
    fn fields_are_little_endian_and_length_prefixed() {
        assert_eq!(round_trip(0x0102_0304_u32), [4, 3, 2, 1]);
        assert_eq!(round_trip(Some(7_u16)), [1, 7, 0]);
        assert_eq!(round_trip(Text::<8>::new("w").unwrap()), [1, 0, b'w']);
        assert_eq!(round_trip(List::<u8, 4>::new(vec![9, 8]).unwrap()), [2, 0, 0, 0, 9, 8]);
        assert_eq!(round_trip(1.0_f64)[7], 0x3f);
    }

    #[test]
    fn limits_are_checked_before_allocation() {
        let mut list = FieldReader::new("test", &[0xff, 0xff, 0xff, 0xff]);
        assert!(List::<u64, { usize::MAX }>::take(&mut list).is_err());
        let mut text = FieldReader::new("test", &[9, 0, b'x']);
        assert!(Text::<8>::take(&mut text).is_err());
        let mut cut = FieldReader::new("test", &[3, 0, b'x']);
        assert!(matches!(Text::<8>::take(&mut cut), Err(ProtocolError::Truncated { .. })));
        let mut latin = FieldReader::new("test", &[1, 0, 0xff]);
        assert!(matches!(Text::<8>::take(&mut latin), Err(ProtocolError::Invalid { .. })));
        assert!(bool::take(&mut FieldReader::new("test", &[2])).is_err());
        assert!(Text::<3>::new("four").is_none());
        assert_eq!(Text::<3>::clipped("añb").as_str(), "añ");
    }

    wire_struct! {
        #[allow(unreachable_pub, reason = "the macro declares public structs")]
        Extended {
            first: u8,
        } behind READ_AHEAD {
            second: u16,
        } behind GOODBYE {
            third: Option<u8>,
        }
    }

    #[test]
    fn a_field_behind_a_feature_is_written_and_read_only_if_the_feature_is_agreed() {
        let whole = Extended { first: 1, second: 2, third: Some(3) };
        let table: [(Features, &[u8], Extended); 4] = [
            (Features::NONE, &[1], Extended { second: 0, third: None, ..whole.clone() }),
            (Features::READ_AHEAD, &[1, 2, 0], Extended { third: None, ..whole.clone() }),
            (Features::GOODBYE, &[1, 1, 3], Extended { second: 0, ..whole.clone() }),
            (Features::ALL, &[1, 2, 0, 1, 3], whole.clone()),
        ];
        for (features, expected, read) in table {
            let mut bytes = Vec::new();
            whole.put(&mut FeatureSink { bytes: &mut bytes, features });
            assert_eq!(bytes, expected);
            let mut reader = FieldReader::new("test", &bytes).with(features);
            assert_eq!(Extended::take(&mut reader).unwrap(), read);
            reader.finish().unwrap();
        }
        // One side that has not agreed does not guess.
        let mut reader = FieldReader::new("test", &[1, 2, 0]);
        Extended::take(&mut reader).unwrap();
        assert!(matches!(reader.finish(), Err(ProtocolError::Trailing { bytes: 2, .. })));
        let mut reader = FieldReader::new("test", &[1]).with(Features::ALL);
        assert!(matches!(Extended::take(&mut reader), Err(ProtocolError::Truncated { .. })));
    }

    #[test]
    fn trailing_bytes_are_rejected() {
        let reader = FieldReader::new("test", &[1]);
        assert_eq!(reader.finish(), Err(ProtocolError::Trailing { message: "test", bytes: 1 }));
    }
}
