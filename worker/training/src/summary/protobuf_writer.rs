//! Encodes protocol buffers: the few field types that event files need.

/// Encodes the fields of one message, in the order of the calls.
///
/// Format: <https://protobuf.dev/programming-guides/encoding/>. Nothing is left out because it has
/// its default value.
#[derive(Debug, Default)]
pub(crate) struct ProtobufWriter {
    bytes: Vec<u8>,
}

/// The wire type of a field's value.
#[derive(Clone, Copy)]
enum WireType {
    Varint = 0,
    Fixed64 = 1,
    LengthDelimited = 2,
    Fixed32 = 5,
}

impl ProtobufWriter {
    /// Returns the encoded message.
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Begins a new message in the same memory, of which it keeps at most `bytes_max`.
    pub(crate) fn clear(&mut self, bytes_max: usize) {
        self.bytes.clear();
        self.bytes.shrink_to(bytes_max);
    }

    /// Encodes an integer, an enum or a boolean.
    pub(crate) fn integer(&mut self, field: u32, value: u64) {
        self.key(field, WireType::Varint);
        self.varint(value);
    }

    pub(crate) fn double(&mut self, field: u32, value: f64) {
        self.key(field, WireType::Fixed64);
        self.bytes.extend_from_slice(&value.to_le_bytes());
    }

    pub(crate) fn float(&mut self, field: u32, value: f32) {
        self.key(field, WireType::Fixed32);
        self.bytes.extend_from_slice(&value.to_le_bytes());
    }

    /// Encodes a string or bytes.
    pub(crate) fn text(&mut self, field: u32, value: impl AsRef<[u8]>) {
        let value = value.as_ref();
        self.key(field, WireType::LengthDelimited);
        self.varint(value.len() as u64);
        self.bytes.extend_from_slice(value);
    }

    /// Encodes a packed list.
    pub(crate) fn doubles(&mut self, field: u32, values: &[f64]) {
        self.key(field, WireType::LengthDelimited);
        self.varint(8 * values.len() as u64);
        values.iter().for_each(|value| self.bytes.extend_from_slice(&value.to_le_bytes()));
    }

    /// Encodes a message in a field. Its length precedes it, so the body moves by a few bytes.
    pub(crate) fn message(&mut self, field: u32, body: impl FnOnce(&mut ProtobufWriter)) {
        self.key(field, WireType::LengthDelimited);
        let start = self.bytes.len();
        body(self);
        let end = self.bytes.len();
        self.varint((end - start) as u64);
        let length_bytes = self.bytes.len() - end;
        self.bytes[start..].rotate_right(length_bytes);
    }

    fn key(&mut self, field: u32, wire_type: WireType) {
        self.varint(u64::from(field) << 3 | wire_type as u64);
    }

    /// Encodes 7 bits a byte, the lowest first; the top bit tells that more follow.
    fn varint(&mut self, mut value: u64) {
        while value > 0x7f {
            self.bytes.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.bytes.push(value as u8);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn encoded(body: impl FnOnce(&mut ProtobufWriter)) -> Vec<u8> {
        let mut writer = ProtobufWriter::default();
        body(&mut writer);
        writer.bytes
    }

    #[test]
    fn the_bytes_of_fields_are_known() {
        let table: [(Vec<u8>, &[u8]); 9] = [
            (encoded(|w| w.integer(1, 0)), &[0x08, 0]),
            (encoded(|w| w.integer(1, 150)), &[0x08, 0x96, 0x01]),
            (encoded(|w| w.integer(16, 127)), &[0x80, 0x01, 0x7f]),
            (
                encoded(|w| w.integer(2, u64::MAX)),
                &[0x10, 255, 255, 255, 255, 255, 255, 255, 255, 255, 1],
            ),
            (encoded(|w| w.double(1, -2.0)), &[0x09, 0, 0, 0, 0, 0, 0, 0, 0xc0]),
            (encoded(|w| w.float(2, 1.5)), &[0x15, 0, 0, 0xc0, 0x3f]),
            (encoded(|w| w.text(2, "testing")), b"\x12\x07testing"),
            (encoded(|w| w.doubles(6, &[0.0])), &[0x32, 8, 0, 0, 0, 0, 0, 0, 0, 0]),
            (
                encoded(|w| {
                    w.message(3, |w| {
                        w.message(1, |_| ());
                        w.integer(1, 150);
                    });
                    w.integer(1, 1);
                }),
                &[0x1a, 5, 0x0a, 0, 0x08, 0x96, 0x01, 0x08, 1],
            ),
        ];
        for (bytes, expected) in table {
            assert_eq!(bytes, expected);
        }
    }

    #[test]
    fn a_long_message_has_a_long_length() {
        let bytes = encoded(|w| w.message(1, |w| w.text(2, vec![7; 300])));
        assert_eq!(bytes[..6], [0x0a, 0xaf, 0x02, 0x12, 0xac, 0x02]);
        assert_eq!(bytes[6..], [7; 300]);
    }
}
